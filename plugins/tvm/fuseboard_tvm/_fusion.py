"""Cut values into kernels: what is computed once and stored, and what shares a loop.

A *root* is a value that is stored somewhere; everything else is computed where it is read. Roots
share a kernel where each reads the others' elements of its own *row* only: the leading axes, one
loop over which is around all of them. A softmax or a layer norm is one kernel that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fuseboard_tvm._values import Extern, Gather, Input, Item, Point, Reduce, Value, View

#: A value whose expression takes more is stored rather than computed again for each reader.
CHEAP = 3
#: No expression becomes longer than this.
LONGEST = 60
#: With no row in common, everything is one row and runs on one thread: small tensors only.
LARGEST_ROW = 1 << 15


@dataclass(eq=False)
class Kernel:
    """One loop over rows.

    :ivar lead: sizes of the leading axes; None for points of one shape, element by element.
    :ivar stored: members that are read outside of the kernel.
    """

    members: list[Value]
    lead: tuple[int, ...] | None
    shape: tuple[int, ...]
    stored: list[Value] = field(default_factory=list)


Group = Kernel | Extern


def plan(outputs: Sequence[Value]) -> list[Group]:
    """Kernels and external calls in an order in which they can run."""
    order = _ordered(outputs)
    roots = _roots(order, outputs)
    groups = _merge([value for value in order if value in roots], roots)
    _find_stored(groups, outputs, roots)
    return groups


def _ordered(outputs: Iterable[Value]) -> list[Value]:
    """All values, each after what it is computed from."""
    seen: set[Value] = set()
    order: list[Value] = []
    pending: list[tuple[Value, bool]] = [(value, False) for value in reversed(list(outputs))]
    while pending:
        value, done = pending.pop()
        if done:
            order.append(value)
        elif value not in seen:
            seen.add(value)
            pending.append((value, True))
            pending.extend((one, False) for one in reversed(value.inputs))
    return order


def _roots(order: Sequence[Value], outputs: Iterable[Value]) -> set[Value]:
    readers: dict[Value, list[Value]] = {value: [] for value in order}
    for value in order:
        for one in value.inputs:
            readers[through_views(one)].append(value)
    readers = {value: _real_readers(value, readers) for value in order}
    roots = {through_views(value) for value in outputs}
    roots.update(value for value in order if isinstance(value, Reduce | Extern | Item | Input))
    for value in order:
        if isinstance(value, Extern):
            roots.update(through_views(one) for one in value.inputs)
    length: dict[Value, int] = {}
    for value in order:
        inner = (through_views(one) for one in value.inputs)
        length[value] = value.cost + sum(length[one] for one in inner if one not in roots)
        if isinstance(value, Point | Gather) and value not in roots and value.inputs:
            if _is_worth_storing(value, length[value], readers[value]):
                roots.add(value)
                length[value] = 0
    return {value for value in roots if not isinstance(value, View)}


def _real_readers(value: Value, readers: dict[Value, list[Value]]) -> list[Value]:
    return [one for one in readers[value] if not isinstance(one, View)]


def _is_worth_storing(value: Value, length: int, readers: Sequence[Value]) -> bool:
    if length > LONGEST:
        return True
    reads = sum(_domain(reader) for reader in readers)
    return (length > CHEAP and reads > 2 * value.numel) or (length > CHEAP and len(readers) > 1)


def _domain(value: Value) -> int:
    """How many elements are visited to compute a value."""
    return value.inputs[0].numel if isinstance(value, Reduce) else value.numel


def through_views(value: Value) -> Value:
    while isinstance(value, View):
        value = value.inputs[0]
    return value


# --- sharing a loop ------------------------------------------------------------------------------


def _merge(roots: Sequence[Value], known: set[Value]) -> list[Group]:
    groups: list[Group] = []
    home: dict[Value, Group] = {}
    above: dict[Group, set[Group]] = {}  # all groups that must run before
    for value in roots:
        if isinstance(value, Input):
            continue
        if isinstance(value, Item):
            home[value] = home[value.inputs[0]]
            continue
        reads = {home[one] for one in sources(value, known) if one in home}
        chosen = None
        if not isinstance(value, Extern):
            chosen = _home(value, reads, above, known, home)
        if chosen is None:
            chosen = value if isinstance(value, Extern) else _alone(value)
            groups.append(chosen)
            above[chosen] = set()
        else:
            chosen.members.append(value)
        home[value] = chosen
        before = above[chosen] | {other for other in reads if other is not chosen}
        before.update(*(above[other] for other in reads if other is not chosen))
        above[chosen] = before
        for earlier in above.values():
            if chosen in earlier:
                earlier |= before
    return _sorted(groups, above)


def sources(value: Value, roots: set[Value]) -> set[Value]:
    """The roots that a value reads."""
    found: set[Value] = set()
    seen: set[Value] = set()
    pending = list(value.inputs)
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in roots:
            found.add(one)
        else:
            pending.extend(one.inputs)
    return found


def in_order(kernel: Kernel, wanted: set[Value], roots: set[Value]) -> list[Value]:
    """What a kernel reads, in an order that depends on the graph alone."""
    found: dict[Value, None] = {}
    seen: set[Value] = set()

    def visit(value: Value) -> None:
        stack = [value]
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in wanted:
                found.setdefault(one)
            elif one not in roots:
                stack.extend(reversed(one.inputs))

    for member in kernel.members:
        for one in member.inputs:
            visit(one)
    return list(found)


def is_irregular(members: Sequence[Value], roots: set[Value]) -> bool:
    """Whether an element comes from computed places or the C library: no vectors."""
    pending = [one for member in members for one in (member, *member.inputs)]
    seen: set[Value] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in roots and value not in members:
            continue
        if (isinstance(value, Gather) and value.inputs) or (
            isinstance(value, Point) and value.scalar
        ):
            return True
        pending.extend(value.inputs)
    return False


def _alone(value: Value) -> Kernel:
    if not isinstance(value, Reduce):
        return Kernel([value], None, value.shape)
    shape = value.inputs[0].shape
    return Kernel([value], _lead(value), shape)


def _lead(value: Reduce) -> tuple[int, ...] | None:
    """The axes that a reduction keeps, if it reduces all the others, which come last."""
    shape = value.inputs[0].shape
    first = min(value.axes, default=len(shape))
    trailing = all(axis in value.axes or shape[axis] == 1 for axis in range(first, len(shape)))
    return shape[:first] if trailing else None


def _home(
    value: Value,
    reads: set[Group],
    above: dict[Group, set[Group]],
    roots: set[Value],
    home: dict[Value, Group],
) -> Kernel | None:
    """A kernel whose row loop a value can share."""
    for kernel in reads:
        if isinstance(kernel, Extern):
            continue
        if any(kernel in above[other] for other in reads if other is not kernel):
            continue
        lead = _shared_lead(value, kernel)
        if lead is not None and _reads_row(value, kernel, lead, roots, home):
            if lead != () or _is_small(value, kernel):
                elementwise = not isinstance(value, Reduce) and kernel.lead is None
                kernel.lead = None if elementwise and value.shape == kernel.shape else lead
                return kernel
    return None


def _shared_lead(value: Value, kernel: Kernel) -> tuple[int, ...] | None:
    """The rows that a value and a kernel have in common; None if there are none."""
    if isinstance(value, Reduce):
        own = _lead(value)
        if own is None:
            return None
        if kernel.lead is None:
            members = all(not isinstance(member, Reduce) for member in kernel.members)
            return own if members and kernel.shape[: len(own)] == own else None
        return own if own == kernel.lead else None
    if kernel.lead is None:
        if isinstance(kernel.members[0], Reduce):
            return None
        return value.shape if value.shape == kernel.shape else None
    lead = kernel.lead
    return lead if value.shape[: len(lead)] == lead else None


def _is_small(value: Value, kernel: Kernel) -> bool:
    return max(_domain(one) for one in (value, *kernel.members)) <= LARGEST_ROW


def _reads_row(
    value: Value,
    kernel: Kernel,
    lead: tuple[int, ...],
    roots: set[Value],
    home: dict[Value, Group],
) -> bool:
    """Whether a value reads the kernel's members at its own row only."""
    depth = len(lead)
    if depth == 0:
        return True
    inside: dict[Value, bool] = {}

    def touches(one: Value) -> bool:
        if one not in inside:
            if one in roots:
                inside[one] = home.get(one) is kernel
            else:
                inside[one] = any(touches(other) for other in one.inputs)
        return inside[one]

    def keeps(one: Value, first: bool) -> bool:
        """``one`` is read at its own row; are its inputs?"""
        if not first and one in roots:
            return one.shape[:depth] == lead
        for other in one.inputs:
            if not touches(other):
                continue
            if isinstance(one, View) and one.keeps < depth:
                return False
            if isinstance(one, Gather):
                return False
            if not isinstance(one, View):
                rank = len(other.shape) == len(one.shape) or isinstance(one, Reduce)
                if not rank or other.shape[:depth] != lead:
                    return False
            if not keeps(other, False):
                return False
        return True

    return keeps(value, True)


def _sorted(groups: Sequence[Group], above: dict[Group, set[Group]]) -> list[Group]:
    done: set[Group] = set()
    result: list[Group] = []
    waiting = list(groups)
    while waiting:
        ready = [group for group in waiting if above[group] <= done]
        if not ready:
            raise AssertionError("kernels wait for each other")
        result.extend(ready)
        done.update(ready)
        waiting = [group for group in waiting if group not in done]
    return result


def _find_stored(groups: Sequence[Group], outputs: Iterable[Value], roots: set[Value]) -> None:
    wanted = {through_views(value) for value in outputs}
    for group in groups:
        if isinstance(group, Extern):
            wanted.update(through_views(one) for one in group.inputs)
            continue
        for member in group.members:
            wanted.update(one for one in sources(member, roots) if one not in group.members)
    for group in groups:
        if isinstance(group, Kernel):
            group.stored = [member for member in group.members if member in wanted]
