"""Which values are computed in one kernel: a group each, in an order in which they can run.

A value joins the group of what it reads if the axes agree: then it is computed from registers.
Otherwise what it reads goes through memory, unless it is so cheap that it is computed again. All
reductions of a group run over the same axes; whatever a group stores has either all of these axes
or none of them, and all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fuseboard_triton._axes import Axes, Conflict, Label, Labels
from fuseboard_triton._ir import Value, product

#: Pointwise ops that are rather computed again than stored and read, and large tensors among what
#: they read.
CHEAP_OPS, CHEAP_READS = 8, 2

#: Groups before the last that a value may join where it reads none of their values.
LOOK_BACK = 6

#: Beyond these a kernel runs out of registers and arguments.
MAX_ITEMS, MAX_LOADS = 128, 24


class Unschedulable(Exception):
    """A value that fits into no kernel, not even alone: its operands' views don't agree."""

    def __init__(self, value: Value) -> None:
        super().__init__(f"the views that {value.op} reads don't fit into one kernel")
        self.value = value


@dataclass(eq=False)
class Item:
    """A value in a group.

    :ivar kind: ``load`` for what is in memory, else the value's kind.
    :ivar labels: the axes of its dimensions.
    """

    kind: str
    value: Value
    labels: Labels
    args: tuple[Item, ...] = ()


@dataclass(eq=False)
class Group:
    """What becomes a kernel.

    :ivar epoch: how many ops that no kernel computes have to run before it, one after the other.
    :ivar items: in an order in which they can be computed.
    :ivar known: value → its item, for what is computed here, again or not, and what is read.
    :ivar members: the values that this group is there to compute.
    :ivar reduced: the axes of its reductions, None while it has none.
    """

    number: int
    epoch: int = 0
    axes: Axes = field(default_factory=Axes)
    items: list[Item] = field(default_factory=list)
    known: dict[Value, Item] = field(default_factory=dict)
    members: dict[Value, Item] = field(default_factory=dict)
    reduced: Label | None = None

    def copy(self) -> Group:
        return Group(
            self.number,
            self.epoch,
            self.axes.copy(),
            list(self.items),
            dict(self.known),
            dict(self.members),
            self.reduced,
        )

    def adopt(self, other: Group) -> None:
        self.axes, self.items, self.known = other.axes, other.items, other.known
        self.members, self.reduced = other.members, other.reduced

    def loads(self) -> list[Item]:
        return [item for item in self.items if item.kind == "load"]

    def reduced_axes(self) -> frozenset[int]:
        return frozenset(self.axes.resolve(self.reduced or ()))

    def axes_of(self, item: Item) -> frozenset[int]:
        """The axes that an item's dimensions run over."""
        return frozenset(a for label in item.labels for a in self.axes.resolve(label))

    def outer_axes(self) -> frozenset[int]:
        found: set[int] = set()
        for item in self.items:
            found |= self.axes_of(item)
        return frozenset(found - self.reduced_axes())

    def keep(self, wanted: Iterable[Value]) -> None:
        """Leave only what these members need."""
        self.members = {value: self.members[value] for value in wanted}
        needed: set[Item] = set()
        pending = list(self.members.values())
        while pending:
            item = pending.pop()
            if item not in needed:
                needed.add(item)
                pending.extend(item.args)
        self.items = [item for item in self.items if item in needed]
        if not any(item.kind == "reduce" for item in self.items):
            self.reduced = None


def schedule(
    order: Iterable[Value],
    stored: Iterable[Value],
    epochs: Mapping[Value, int],
    hint: Callable[[Any], int],
) -> list[Group]:
    """The groups that compute these values, in order. Members are what each has to store.

    :param order: the values to compute, each after what it reads; views, numbers and what is in
        memory already may be among them.
    :param stored: those that are needed in memory.
    :param epochs: value → how many ops that no kernel computes it waits for, one after the other.
    :param hint: a size as a number, in the example.
    :raises Unschedulable: a value fits into no kernel.
    """
    return _Scheduler(list(order), dict.fromkeys(stored), epochs, hint).run()


def base_of(value: Value) -> Value:
    """What a view is a view of."""
    while value.kind == "view":
        value = value.args[0]
    return value


class _Scheduler:
    def __init__(
        self,
        order: list[Value],
        stored: dict[Value, None],
        epochs: Mapping[Value, int],
        hint: Callable[[Any], int],
    ) -> None:
        self.epochs = epochs
        self.order = [v for v in order if v.kind in ("pointwise", "reduce")]
        self.stored = stored
        self.hint = hint
        self.groups: list[Group] = []
        self.home: dict[Value, Group] = {}
        self.readers: dict[Value, list[Value]] = {}
        self._costs: dict[Value, tuple[int, frozenset[Value]]] = {}
        for value in self.order:
            for used in value.args:
                self.readers.setdefault(base_of(used), []).append(value)

    def run(self) -> list[Group]:
        for value in self.order:
            if value.kind == "pointwise":
                self._cost(value)  # in order: later ones find their operands'
            self._place(value)
        for value in self.stored:
            if value.kind in ("const", "symbol", "index"):
                self._alone(value)
        return self._living()

    def _living(self) -> list[Group]:
        """The groups with what they are needed for: what is stored, or read by later ones."""
        read: set[Value] = set()
        living = []
        for group in reversed(self.groups):
            wanted = [v for v in group.members if v in self.stored or v in read]
            if wanted:
                group.keep(wanted)
                read |= {load.value for load in group.loads()}
                living.append(group)
        return living[::-1]

    # --- placing --------------------------------------------------------------------------------

    def _place(self, value: Value) -> None:
        for group in self._candidates(value):
            for sharing in (True, False):
                trial = group.copy()
                try:
                    trial.members[value] = self._compute(trial, value, sharing)
                    trial.known[value] = trial.members[value]
                    self._check(trial, value)
                except Conflict:
                    continue
                group.adopt(trial)
                self.home[value] = group
                return
        self._alone(value)

    def _alone(self, value: Value) -> None:
        for sharing in (True, False):
            group = Group(len(self.groups), self.epochs.get(value, 0))
            try:
                if value.kind in ("pointwise", "reduce"):
                    item = self._compute(group, value, sharing)
                else:
                    item = self._leaf(group, value)
                group.known[value] = group.members[value] = item
                self._check(group, value)
            except Conflict:
                continue
            self.groups.append(group)
            self.home[value] = group
            return
        raise Unschedulable(value)

    def _candidates(self, value: Value) -> list[Group]:
        """Groups that a value might join, the best first."""
        bases = [base_of(used) for used in value.args]
        homes = {self.home[base] for base in bases if base in self.home}
        own = sorted(homes, key=lambda group: group.number, reverse=True)
        read = {base for base in bases if base.kind == "buffer" or base in self.home}
        others = [
            group
            for group in reversed(self.groups[-LOOK_BACK:])
            if group not in homes and any(load.value in read for load in group.loads())
        ]
        epoch = self.epochs.get(value, 0)
        return [group for group in (*own, *others) if group.epoch == epoch]

    def _check(self, group: Group, new: Value) -> None:
        """Hold a group that has grown against the rules.

        :raises Conflict: it breaks one.
        """
        loads = group.loads()
        if len(group.items) > MAX_ITEMS or len(loads) > MAX_LOADS:
            raise Conflict("too much for one kernel")
        for load in loads:
            if load.value in self.home and self.home[load.value].number >= group.number:
                raise Conflict("it waits for a later kernel")
        outer, reduced = group.outer_axes(), group.reduced_axes()
        for item in group.items:
            axes = [a for label in item.labels for a in group.axes.resolve(label)]
            if len(set(axes)) != len(axes):
                raise Conflict("a dimension would run along another one of the same value")
            if item.kind == "reduce" and not outer <= set(axes):
                raise Conflict("a reduction would be computed again for each place of an axis")
        for value, item in group.members.items():
            if self._needs_memory(value, group, new):
                own = group.axes_of(item)
                if not outer <= own or (own & reduced and not reduced <= own):
                    raise Conflict("what is stored doesn't have all axes")

    def _needs_memory(self, value: Value, group: Group, new: Value) -> bool:
        if value in self.stored:
            return True
        return any(r not in group.known and r is not new for r in self.readers.get(value, ()))

    # --- computing ------------------------------------------------------------------------------

    def _compute(self, group: Group, value: Value, sharing: bool) -> Item:
        """The item of a pointwise op or reduction, its operands found, computed again or read."""
        operands = [self._read(group, used, sharing) for used in value.args]
        items = tuple(item for item, _ in operands)
        if value.kind == "pointwise":
            labels = group.axes.pointwise([labels for _, labels in operands])
        else:
            ((_, given),) = operands
            along = tuple(a for dim in value.param for a in group.axes.resolve(given[dim]))
            labels = tuple(() if d in value.param else label for d, label in enumerate(given))
            if group.reduced is None:
                group.reduced = along
            elif frozenset(along) != group.reduced_axes():
                raise Conflict("reductions over other axes")
        item = Item(value.kind, value, labels, items)
        group.items.append(item)
        return item

    def _read(self, group: Group, value: Value, sharing: bool) -> tuple[Item, Labels]:
        """An operand: the item it is a view of, and the labels of the view."""
        if value.kind == "view":
            item, labels = self._read(group, value.args[0], sharing)
            return item, group.axes.viewed(value, labels)
        item = group.known.get(value)
        if item is not None and (sharing or value in group.members):
            return item, item.labels
        if value in self.home and self._is_cheap(value):
            item = self._compute(group, value, sharing)
        else:
            item = self._leaf(group, value)
        group.known[value] = item
        return item, item.labels

    def _leaf(self, group: Group, value: Value) -> Item:
        """Something that is in memory, or that no tensor is read for."""
        in_memory = value.kind in ("buffer", "pointwise", "reduce")
        item = Item(
            "load" if in_memory else value.kind, value, group.axes.fresh_labels(value.shape)
        )
        group.items.append(item)
        return item

    def _is_cheap(self, value: Value) -> bool:
        """Whether to compute a value of another group again rather than to read it."""
        if value.kind != "pointwise":
            return False
        ops, reads = self._cost(value)
        size = self._numel(value)
        large = sum(2 * self._numel(read) >= size for read in reads)
        return ops <= CHEAP_OPS and large <= (1 if value in self.stored else CHEAP_READS)

    def _cost(self, value: Value) -> tuple[int, frozenset[Value]]:
        """The ops of a pointwise value, down to what is in memory, and what that is."""
        if value not in self._costs:
            ops, reads = 1, frozenset[Value]()
            for used in map(base_of, value.args):
                if used.kind == "pointwise":
                    more, others = self._cost(used)
                    ops, reads = min(ops + more, 1000), reads | others
                elif used.kind in ("buffer", "reduce"):
                    reads |= {used}
            self._costs[value] = ops, reads
        return self._costs[value]

    def _numel(self, value: Value) -> int:
        return self.hint(product(value.shape))
