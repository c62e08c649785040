"""The user's wishes: the settings ``pin`` and ``exclude``, and ``fuseboard.prefer`` in a model.

And which errors the setting ``tolerance`` allows where, if that is by patterns.

A pattern is compared with dotted names part by part: with the paths of modules (``layers.*.mlp``)
and with ops (``aten.mm``, ``mkldnn.*``). ``*``, ``?`` and ``[...]`` stand within a part, ``**`` for
any number of parts. What lies below a match is matched, too: everything inside of the module, every
overload of the op.

``exclude`` has the last word, then ``pin``, then ``prefer``. Of several pins the more specific one
counts: that with more parts without a wildcard, then with more letters, then the later one.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property

from torch.fx import GraphModule, Node

from fuseboard.board import Session
from fuseboard.contracts import Claim, Decline
from fuseboard.errors import SettingsError
from fuseboard.partition.claims import claimed_names
from fuseboard.partition.marks import PREFER, mark_of
from fuseboard.partition.paths import ModulePaths, op_names, paths_in
from fuseboard.torch_api import internals as torch_internals
from fuseboard.torch_api.frames import FrameScope, frame_scope

Answers = Mapping[str, Sequence[Claim | Decline]]

#: Settings of these places speak of the one model that they are given with. Those of files and of
#: the environment speak of whatever is compiled, where a pattern may well match nothing.
_FOR_ONE_MODEL = ("torch.compile(options=)", "fuseboard.settings(...)")

#: How many near names an error lists.
_SHOWN = 5

_warned: set[str] = set()


@dataclass(frozen=True)
class Rule:
    """One pattern of ``pin``, ``exclude`` or ``tolerance``.

    :ivar backend: "" for ``tolerance``.

    :ivar text: how the user wrote it, such as ``pin.layers.*.mlp = 'mkldnn'``.
    """

    pattern: str
    backend: str
    text: str
    origin: str

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile("".join(_part(part) for part in self.pattern.split(".")))

    def matches(self, name: str) -> bool:
        """Whether a dotted name, or what it lies below, is meant."""
        return self._expression.match(name) is not None

    @property
    def specificity(self) -> tuple[int, int]:
        parts = self.pattern.split(".")
        plain = [part for part in parts if not set(part) & set("*?[")]
        return len(plain), sum(character not in "*?[]" for character in self.pattern)

    @property
    def where(self) -> str:
        return f"{self.text}, set in {self.origin}"


def _part(part: str) -> str:
    """A regular expression for one part of a pattern, with the dot or the end that follows it."""
    if part == "**":
        return r"(?:[^.]+(?:\.|\Z))*"
    pieces = re.findall(r"\[!?[^\]]+\]|.", part)
    wild = {"*": "[^.]*", "?": "[^.]"}
    expression = "".join(
        wild.get(piece) or (piece.replace("[!", "[^") if len(piece) > 1 else re.escape(piece))
        for piece in pieces
    )
    return rf"(?!\.|\Z){expression}(?:\.|\Z)"


@dataclass(frozen=True)
class Wishes:
    """What the user wants for the nodes of one graph.

    :ivar pins: node → backend, where that backend claims the node.
    :ivar reasons: node → why it is there.
    :ivar unmet: node → which wish couldn't be followed, and why.
    :ivar notes: the same in few words, for the report.
    """

    pins: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    unmet: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def reason(self, node: str, reason: str) -> str:
        """A node's reason in the plan, with what the wish has to do with it."""
        if node in self.reasons:
            return self.reasons[node]
        return f"{reason}; {self.unmet[node]}" if node in self.unmet else reason

    def with_boards(self, nodes: Iterable[str], backend: str, why: str) -> Wishes:
        """The same, with nodes that the board wants there."""
        own = list(nodes)
        return dataclasses.replace(
            self,
            pins={**self.pins, **dict.fromkeys(own, backend)},
            reasons={**self.reasons, **dict.fromkeys(own, why)},
        )


@dataclass(frozen=True)
class _Wish:
    """:ivar where: ``text``, and where that was set."""

    backend: str
    text: str
    where: str


class Pins:
    """The wishes that hold for one call of the backend.

    They are made within that call, where the modules are that patterns are compared with. From then
    on they know these by name, so that another process can follow them.

    :param graph: Dynamo's graph; None where there is none.
    :raises SettingsError: a pattern matches nothing, and it was given for this model alone.
    """

    def __init__(self, session: Session, graph: GraphModule | None = None) -> None:
        settings = session.settings
        self._backends = [info.name for info in session.backends]
        self.pins = [
            Rule(pattern, name, f"pin.{pattern} = {name!r}", settings.origin(f"pin.{pattern}"))
            for pattern, name in settings.pin.items()
        ]
        self.excludes = [
            Rule(pattern, name, f"exclude.{name} = {pattern!r}", settings.origin(f"exclude.{name}"))
            for name, patterns in settings.exclude.items()
            for pattern in patterns
        ]
        self._tolerance = settings.tolerance
        table = self._tolerance if isinstance(self._tolerance, dict) else {}
        self._tolerances = {
            Rule(
                pattern,
                "",
                f"tolerance.{pattern} = {allowed:g}",
                settings.origin(f"tolerance.{pattern}"),
            ): allowed
            for pattern, allowed in table.items()
        }
        self._notes: list[str] = []
        rules = [*self.pins, *self.excludes, *self._tolerances]
        # A look at the callers' locals keeps what they hold alive for as long as those frames run.
        scope = frame_scope() if rules and graph is not None else FrameScope({}, [])
        self.paths = ModulePaths(scope)
        if rules and graph is not None:
            self._check(rules, self.paths.known | paths_in(graph, self.paths))

    # --- before anything is compiled ------------------------------------------------------------

    def _check(self, rules: Sequence[Rule], known: Collection[str]) -> None:
        """Every pattern must mean a module that is there, or an op that exists."""
        ops: list[str] = []
        for rule in rules:
            if rule in self.pins and rule.backend not in self._backends:
                self._complain(
                    rule,
                    f"{rule.backend!r} isn't among the backends in use: "
                    f"{', '.join(self._backends)}.",
                )
            if any(map(rule.matches, known)):
                continue
            ops = ops or torch_internals.registered_ops()
            if not any(map(rule.matches, ops)):
                problem = f"{rule.pattern!r} matches no module and no op.{_near(rule, known, ops)}"
                self._complain(rule, problem)

    def _complain(self, rule: Rule, problem: str) -> None:
        message = f"{rule.where}: {problem}"
        if rule.origin in _FOR_ONE_MODEL:
            raise SettingsError(message)
        self._notes.append(message)
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, stacklevel=2)

    def described(self, graph: GraphModule) -> str:
        """What patterns are compared with in Dynamo's graph; "" where there are no patterns."""
        if not (self.pins or self.excludes or self._tolerances):
            return ""
        return repr([*self._names(list(graph.graph.nodes)).values()])

    # --- for each graph -------------------------------------------------------------------------

    def tolerances(self, nodes: Sequence[Node]) -> dict[str, float]:
        """The error that each node may cause, by name."""
        if not isinstance(self._tolerance, dict):
            return {node.name: self._tolerance for node in nodes}
        names = self._names(nodes)
        found = {}
        for node in nodes:
            rules = [rule for rule in self._tolerances if any(map(rule.matches, names[node]))]
            best = max(reversed(rules), key=lambda rule: rule.specificity, default=None)
            found[node.name] = 0.0 if best is None else self._tolerances[best]
        return found

    def _names(self, nodes: Sequence[Node]) -> dict[Node, tuple[str, ...]]:
        """The paths and ops that patterns are compared with."""
        paths = self.paths.of_nodes(nodes)
        return {node: (*paths[node], *op_names(_source_of(node))) for node in nodes}

    def of(self, nodes: Sequence[Node]) -> GraphPins:
        """The same for one graph."""
        names: dict[Node, tuple[str, ...]] = {}
        if self.pins or self.excludes:
            names = self._names(nodes)
        return GraphPins(nodes, names, self.pins, self.excludes, tuple(self._notes))


class GraphPins:
    """The wishes for the nodes of one graph. A ``getitem`` goes where its source goes.

    :ivar excluded: backend → node → the reason that it may not run there.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        names: Mapping[Node, tuple[str, ...]],
        pins: Sequence[Rule],
        excludes: Sequence[Rule],
        notes: tuple[str, ...],
    ) -> None:
        self._notes = notes
        self._rules = (*pins, *excludes)
        self._met: Counter[Rule] = Counter()
        self.excluded: dict[str, dict[str, str]] = {}
        for node, own in names.items():
            for rule in excludes:
                if any(map(rule.matches, own)):
                    self._met[rule] += 1
                    why = f"excluded by {rule.where}"
                    self.excluded.setdefault(rule.backend, {}).setdefault(node.name, why)
        self._wishes: dict[Node, _Wish] = {}
        for node in nodes:
            wish = self._pinned(names.get(node, ()), pins) or self._preferred(node)
            if wish is not None:
                self._wishes[node] = wish

    def _pinned(self, names: Sequence[str], pins: Sequence[Rule]) -> _Wish | None:
        best: Rule | None = None
        for rule in pins:
            if any(map(rule.matches, names)):
                self._met[rule] += 1
                if best is None or rule.specificity >= best.specificity:
                    best = rule
        return None if best is None else _Wish(best.backend, best.text, best.where)

    def _preferred(self, node: Node) -> _Wish | None:
        """AOTAutograd hands marks on to the backward by ``seq_nr``, but not to sums of gradients:
        these get what all of their summands have.
        """
        backend = mark_of(_source_of(node), PREFER)
        if backend is not None:
            text = f"fuseboard.prefer({str(backend)!r})"
            return _Wish(str(backend), text, text)
        if node.meta.get("is_gradient_acc"):
            wishes = {self._wishes.get(used) for used in node.all_input_nodes}
            if len(wishes) == 1:
                return wishes.pop()
        return None

    def resolve(self, claims: Answers) -> Wishes:
        """Which nodes go where, as far as the claims allow it."""
        taken = {name: claimed_names(answers) for name, answers in claims.items()}
        pins = {
            node.name: wish.backend
            for node, wish in self._wishes.items()
            if node.name in taken.get(wish.backend, ())
        }
        together = _complete(pins, claims)
        wished = {node.name: wish for node, wish in self._wishes.items()}
        reasons = {
            name: f"by {wished[name].text}"
            if name in wished and wished[name].backend == backend
            else f"part of what {backend} takes as one, with {together[name]!r}"
            for name, backend in pins.items()
        }
        unmet: dict[str, str] = {}
        missed: dict[str, Counter[str]] = {}
        for name, wish in wished.items():
            if pins.get(name) != wish.backend:
                why = _why_not(name, wish.backend, claims, together)
                unmet[name] = f"not on {wish.backend}, as {wish.text} wants: {why}"
                missed.setdefault(wish.where, Counter())[why] += 1
        return Wishes(pins, reasons, unmet, self._unmet_notes(wished, missed))

    def _unmet_notes(
        self, wished: Mapping[str, _Wish], missed: Mapping[str, Counter[str]]
    ) -> tuple[str, ...]:
        notes = [*self._notes]
        counts = Counter(wish.where for wish in wished.values())
        for text, count in counts.items():
            reasons = missed.get(text, Counter())
            told = f"{text}: followed for {count - reasons.total()} of {_ops(count)}"
            notes.append(told + "".join(f"; {n} not: {why}" for why, n in reasons.most_common()))
        for rule in self._rules:
            if rule.text.startswith("exclude") and self._met[rule]:
                notes.append(f"{rule.where}: {_ops(self._met[rule])}")
            elif not self._met[rule]:
                notes.append(f"{rule.where}: matches nothing in this graph")
            elif rule.where not in counts:
                notes.append(f"{rule.where}: other pins are more specific wherever it matches")
        return tuple(notes)


def _ops(count: int) -> str:
    return f"{count} op{'' if count == 1 else 's'}"


def _source_of(node: Node) -> Node:
    """What made a tuple's item; else the node itself."""
    while node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _complete(pins: dict[str, str], claims: Answers) -> dict[str, str]:
    """Pin the whole of what a backend takes all or none of, where a part of it is pinned to it.

    Where another part is pinned elsewhere, the claim falls and with it its own pins.

    :returns: node → the pinned node that it goes with, or that kept it from being followed.
    """
    because: dict[str, str] = {}
    for backend, answers in claims.items():
        free = {n for c in answers if isinstance(c, Claim) and not c.together for n in c.nodes}
        for claim in answers:
            if not isinstance(claim, Claim) or not claim.together:
                continue
            own = sorted(n for n in claim.nodes - free if pins.get(n) == backend)
            others = sorted(n for n in claim.nodes if pins.get(n, backend) != backend)
            for name in own if others else ():
                del pins[name]
                because[name] = others[0]
            for name in claim.nodes if own and not others else ():
                if name not in pins:
                    pins[name], because[name] = backend, own[0]
    return because


def _why_not(name: str, backend: str, claims: Answers, together: Mapping[str, str]) -> str:
    """Why a backend doesn't run a node."""
    if backend not in claims:
        return f"{backend!r} isn't among the backends in use, {', '.join(claims)}"
    for answer in claims[backend]:
        if isinstance(answer, Decline) and answer.node == name:
            return answer.reason
    if name in together:
        return f"{backend} takes it as one with {together[name]!r}, which is pinned elsewhere"
    return f"{backend} didn't claim it and gave no reason"


def _near(rule: Rule, known: Collection[str], ops: Sequence[str]) -> str:
    """What the user may have meant."""
    namespace = rule.pattern.partition(".")[0]
    near_ops = get_close_matches(rule.pattern, {op.rpartition(".")[0] for op in ops}, n=3)
    if any(op.startswith(f"{namespace}.") for op in ops):
        return f" Nearest ops: {', '.join(near_ops) or f'none of {namespace}'}."
    # Numbered blocks as one: a list of layers.0 to layers.4 would say little.
    paths = {re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", path) for path in known}
    if paths == {"*"}:  # of an nn.Sequential
        paths = set(known)
    if not paths:
        return " There are no modules in what is compiled."
    near = get_close_matches(rule.pattern, sorted(paths), n=_SHOWN, cutoff=0.5)
    near = near or sorted(paths, key=lambda path: (path.count("."), path))[:_SHOWN]
    return f" Nearest module paths: {', '.join(near)}."
