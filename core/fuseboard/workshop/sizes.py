"""Which calls a program with symbolic sizes answers.

Dynamo's guards let calls of many sizes come to one graph. What capture, lowering and judging
learned of the sizes in another process, Dynamo can't be told any more. So it is the program's own
condition: where it doesn't hold, Dynamo's own graph answers. That graph also answers the first call
of sizes unlike all before, on whose inputs the two are compared beside the calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuseboard.run.codegen import Source
from fuseboard.run.sizes import bucket_source, size_sources, symbol_sources
from fuseboard.torch_api.symbols import GuardWatch

Run = Callable[..., Any]


class NoCondition(Exception):
    """It can't be told from a call's sizes whether a program is good for it; the text says why."""


@dataclass(frozen=True)
class SizeCondition:
    """What has to hold of a call's sizes, and which sizes are alike.

    Expressions of ``args``, the arguments of Dynamo's graph, so that it means the same in each
    process.

    :ivar symbols: symbol → the expression that gives it.
    :ivar names: of the symbols, for people.
    :ivar terms: what has to hold, as Python over the symbols.
    :ivar sizes: an expression that is equal for calls of the same sizes.
    :ivar bucket: one that is equal for calls of like sizes.
    :ivar guards: how many guards there are, Dynamo's included.
    """

    symbols: dict[str, str]
    names: dict[str, str]
    terms: tuple[str, ...]
    sizes: str
    bucket: str
    guards: int = 0

    @classmethod
    def on(cls, inputs: Sequence[Any]) -> SizeCondition | None:
        """One that holds for all calls of a graph; None where all sizes are plain.

        :param inputs: fake ones of Dynamo's graph, of whose sizes no more is known than by Dynamo.
        """
        sources = size_sources(inputs)
        if not sources:
            return None
        symbols = symbol_sources(inputs)
        by_source = dict(sources)
        names = {symbol: by_source.get(source, symbol) for symbol, source in symbols.items()}
        sizes = f"({', '.join(source for source, _ in sources)},)"
        return cls(symbols, names, (), sizes, bucket_source(inputs))

    def with_terms(self, learned: GuardWatch) -> SizeCondition:
        """The same, with what was learned besides.

        :raises NoCondition: it can't be told.
        """
        terms = learned.all_code()
        if terms is None:
            raise NoCondition("it depends on numbers that only a call decides")
        terms = list(dict.fromkeys((*self.terms, *terms)))
        made = replace(self, terms=tuple(terms), guards=learned.guards)
        try:
            known = dict.fromkeys(self.symbols, 2)
            for term in terms:
                eval(term, dict(_FUNCTIONS), known)
        except ArithmeticError:  # of these sizes
            pass
        except Exception as error:  # whatever code that torch prints may raise
            raise NoCondition(f"the condition {term} can't be told from a call: {error}") from error
        return made

    def holds(self) -> Callable[[Sequence[Any]], bool]:
        """A function of a call's arguments."""
        return _function(f"bool({self.text()})")

    def sizes_of(self) -> Callable[[Sequence[Any]], Any]:
        """A function of a call's arguments: what is equal for the same sizes."""
        return _function(self.sizes)

    def bucket_of(self) -> Callable[[Sequence[Any]], Any]:
        """A function of a call's arguments: what is equal for like sizes."""
        return _function(self.bucket)

    def described(self) -> str:
        """The terms, as people read them."""
        text = " and ".join(self.terms)
        return re.sub(r"\b[a-z]+\d+\b", lambda found: self.names.get(found[0], found[0]), text)

    def text(self) -> str:
        """The terms as one expression of ``args``."""
        names = ", ".join(self.symbols)
        return f"(lambda {names}: {self.joined()})({', '.join(self.symbols.values())})"

    def joined(self) -> str:
        """The terms as one expression of the symbols."""
        return " and ".join(f"({term})" for term in self.terms) or "True"


#: What torch's printer of expressions calls.
_FUNCTIONS: dict[str, Any] = {"math": math, "max": max, "min": min, "Max": max, "Min": min}


class SizeRoute:
    """Sends the calls of a graph by their sizes: to what was chosen, or to Dynamo's own graph.

    :param program: what was chosen.
    :param outside: answers a call for which the condition doesn't hold.
    :param unseen: answers a call of sizes unlike all in ``seen``; is given their bucket first.
        None: there are no such calls.
    :ivar run: what a call executes.
    :ivar put: lets calls that are good for what was chosen go to another program.
    :ivar seen: buckets of the sizes for which what was chosen is known to be right.
    """

    def __init__(
        self, condition: SizeCondition, program: Run, outside: Run, unseen: Run | None
    ) -> None:
        self.seen: set[Any] = set()
        source = Source()
        source.globals.update(_FUNCTIONS)
        name = source.unique("by_sizes")
        if condition.terms:
            terms = condition.joined()
            for symbol, text in condition.symbols.items():
                if re.search(rf"\b{symbol}\b", terms):
                    source.line(f"{symbol} = {text}")
            source.line(f"if not ({terms}):")
            source.line(f"return {source.bind(outside, 'outside')}(*args)", 2)
        if unseen is not None:
            source.line(f"bucket = {condition.bucket}")
            source.line(f"if bucket not in {source.bind(self.seen, 'seen')}:")
            source.line(f"return {source.bind(unseen, 'unseen')}(bucket, *args)", 2)
        place = source.bind_apart(program, "program")
        source.line(f"return {place}(*args)")
        self.run: Run = source.function(name, "*args")

        def put(program: Run) -> None:
            source.globals[place] = program

        self.put = put


def _function(expression: str) -> Callable[[Sequence[Any]], Any]:
    source = Source()
    source.globals.update(_FUNCTIONS)
    source.line(f"return {expression}")
    return source.function(source.unique("sizes"), "args")
