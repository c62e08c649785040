"""Artifacts of lowered regions: what another process takes from the cache, and when it doesn't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseboard
from fuseboard.lower import machine
from fuseboard.lower.artifacts import ARTIFACT, ASIDE, LOCK
from tests.support.backends import compiled, last_graph, plugged
from tests.support.cached_program import run

ROOT = Path(__file__).parents[1]
NEAR = "not in the cache, where an entry for the same graph differs in: "


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path / "cache")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def start(directory: str, **changes: Any) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.support.cached_program", directory, json.dumps(changes)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> dict[str, Any]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


def files(directory: str, ending: str) -> list[Path]:
    return sorted(Path(directory).rglob(f"*{ending}"))


# --- hits -----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_another_process_takes_the_artifact_without_lowering(directory):
    """The second process calls fuseboard_load and never fuseboard_lower; its report says so."""
    first = finish(start(directory))
    assert (first["lowered"], first["load_calls"], first["loaded"]) == (1, 0, [False])
    second = finish(start(directory))
    assert (second["lowered"], second["load_calls"], second["loaded"]) == (0, 1, [True])
    assert first["right"]
    assert second["right"]
    assert second["notes"] == first["trips"] == second["trips"] == []


@pytest.mark.thorough
def test_two_processes_at_once(directory):
    """Both write; both are right; what is left is one whole artifact that a third one takes."""
    both = [start(directory, sleep_s=1.0) for _ in range(2)]
    for process in both:
        told = finish(process)
        assert told["right"]
        assert told["warnings"] == []
    assert len(files(directory, ARTIFACT)) == 1
    assert files(directory, ".tmp") == []
    assert run(directory)["lowered"] == 0


def test_symbolic_sizes_are_taken_from_the_cache(directory):
    """Code for any size serves any size, in the process that finds it as well."""
    assert run(directory, dynamic=True)["lowered"] == 1
    told = run(directory, dynamic=True, size=7)
    assert (told["lowered"], told["right"]) == (0, True)


def test_guards_of_lowering_are_learned_again(directory):
    """Code that is only good for sizes above 6: loaded where that holds, with the guard, so that a
    smaller size is compiled again."""
    counts = {"lowered": 0, "loaded": 0}

    def lower(region, inputs):
        counts["lowered"] += 1
        (x,) = (value for value in inputs if isinstance(value, torch.Tensor))
        assert bool(x.shape[0] > 6) in (True, False)  # looking at it makes the guard
        call = fuseboard.lower_eagerly(region).call
        return fuseboard.LoweredRegion(call=call, artifact=b"code")

    def load(region):
        counts["loaded"] += 1
        return fuseboard.lower_eagerly(region)

    def told(*sizes):
        counts.update(lowered=0, loaded=0)
        torch._dynamo.reset()
        with plugged("fake", lower=lower, load=load), torch.no_grad():
            call = compiled(torch.relu, "fake", dynamic=True, cache_dir=directory)
            for size in sizes:
                x = torch.randn(size, 3)
                torch.testing.assert_close(call(x), torch.relu(x))
        return counts["lowered"], counts["loaded"]

    assert told(9) == (1, 0)
    assert told(9, 8) == (0, 1)
    assert told(7, 4) == (1, 1)
    assert told(4, 9) == (0, 2)


def test_weights_of_other_contents_are_the_same_key(directory):
    """They are inputs, not part of the code."""
    run(directory)
    told = run(directory, weight=5.0)
    assert (told["lowered"], told["right"]) == (0, True)


# --- misses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"fingerprint": "2"}, "fingerprint"),
        ({"option": 2}, "options"),
        ({"threads": 2}, "threads"),
        ({"precision": "high"}, "numerics"),
        ({"settings": {"random": "fast"}}, "random"),
    ],
    ids=lambda value: str(value),
)
def test_a_miss_names_the_part_that_differs(directory, change, part):
    """Nothing is taken from an entry that differs in anything; the report says in what."""
    run(directory)
    told = run(directory, **change)
    assert told["lowered"] == 1
    assert told["right"]
    assert [note for note in told["notes"] if note.startswith(NEAR)] == [NEAR + part]


@pytest.mark.parametrize(
    ("name", "part"),
    [("machine.processor", "processor"), ("cache_keys.code_hash", "code, composites")],
)
def test_another_machine_or_code_is_a_miss(directory, name, part, monkeypatch):
    """The processor's abilities and the plugin's own files are parts of the key."""
    run(directory)
    monkeypatch.setattr(f"fuseboard.lower.{name}", lambda *args: "another")
    told = run(directory)
    assert (told["lowered"], told["notes"]) == (1, [NEAR + part, "lowered"])


@pytest.mark.parametrize("package", ["torch", "fuseboard"])
def test_another_version_is_a_miss(directory, package, monkeypatch):
    """Of torch, or of fuseboard."""
    run(directory)
    if package == "torch":
        monkeypatch.setattr(torch.version, "git_version", "another")
    else:
        monkeypatch.setattr(machine, "fuseboard_version", lambda: "99.0")
    told = run(directory)
    assert (told["lowered"], told["notes"]) == (1, [NEAR + package, "lowered"])


@pytest.mark.parametrize("change", [{"size": 6}, {"factor": 3.0}], ids=str)
def test_another_graph_is_a_miss_of_which_nothing_is_said(directory, change):
    """Sizes and constants are the graph's; no entry is near."""
    run(directory)
    told = run(directory, **change)
    assert (told["lowered"], told["notes"], told["right"]) == (1, ["lowered"], True)


def test_what_is_baked_in_is_part_of_the_key(directory):
    """A backend that builds in the values of weights gets an artifact of equal values only."""
    assert run(directory, bakes=True)["lowered"] == 1
    assert run(directory, bakes=True)["lowered"] == 0
    told = run(directory, bakes=True, weight=5.0)
    assert (told["lowered"], told["notes"]) == (1, [NEAR + "weights", "lowered"])


def test_regions_whose_weights_are_baked_in_share_no_code(directory):
    """Two places with one signature have other weights, and so code of their own."""
    seen: list[Any] = []

    def lower(region):
        seen.append(region.signature)
        return fuseboard.lower_eagerly(region)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.randn(3, 3)) for _ in range(2))

        def forward(self, x):
            return (x @ self.a).sort().values @ self.b

    def no_sort(graph):
        return fuseboard.claim_nodes(
            graph, lambda n: "sort" if "sort" in n.name or "getitem" in n.name else None
        )

    model, x = Net(), torch.randn(3, 3)
    for bakes, count in ((False, 1), (True, 2)):
        seen.clear()
        torch._dynamo.reset()
        info = {"bakes_constants": bakes}
        with plugged("fake", claim=no_sort, lower=lower, info=info), torch.no_grad():
            call = compiled(model, "fake", cache_dir=directory, min_region_us=0)
            torch.testing.assert_close(call(x), model(x))
        assert len(seen) == count, seen
        assert len(set(seen)) == 1


def test_the_cache_can_be_off(directory):
    """Nothing is looked up, nothing is stored."""
    run(directory)
    told = run(directory, settings={"cache": False})
    assert (told["lowered"], told["load_calls"]) == (1, 0)
    run(directory + "2", settings={"cache": False})
    assert not Path(directory + "2").exists()


def test_no_artifact_means_nothing_is_stored(directory):
    """A backend needn't give one. What is left is the lock that kept others out meanwhile."""
    assert run(directory, artifact=False)["lowered"] == 1
    assert {path.suffix for path in Path(directory).rglob("*") if path.is_file()} == {LOCK}


def test_what_has_no_name_elsewhere_is_not_cached(directory):
    """The report says why; here an argument that is an object of this process."""

    def rewrite(graph, region):
        def apply():
            node = next(
                iter(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default))
            )
            node.kwargs = {"inplace": object()}

        return [fuseboard.Fusion("odd", (), apply)] if region is not None else None

    def load():
        raise AssertionError

    def lower(region):
        (node,) = region.graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.relu.default
        )
        node.kwargs = {}
        call = fuseboard.lower_eagerly(region).call
        return fuseboard.LoweredRegion(call=call, artifact=b"x")

    with plugged("fake", fuse=rewrite, lower=lower, load=load), torch.no_grad():
        compiled(torch.relu, "fake", cache_dir=directory)(torch.randn(3))
    (region,) = last_graph().regions
    assert region.notes == [
        "not cached: an argument of relu of type object means nothing to another process"
    ]
    assert not Path(directory).exists()


# --- when something is wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "foreign"])
def test_a_damaged_file_is_set_aside(directory, damage):
    """One warning, a miss, and a new artifact in its place that serves the next process."""
    run(directory)
    (path,) = files(directory, ARTIFACT)
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-3],
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
            "emptied": b"",
            "foreign": b"something else",
        }[damage]
    )
    told = run(directory)
    assert (told["lowered"], told["right"], told["trips"]) == (1, True, [])
    assert [("set aside" in text) for text in told["warnings"]] == [True]
    assert len(files(directory, ASIDE)) == 1
    told = run(directory)
    assert (told["lowered"], told["warnings"]) == (0, [])


def test_a_process_that_died_while_it_wrote_leaves_no_half_an_artifact(directory):
    """Its temporary file is nobody's artifact, and goes when it is old."""
    run(directory)
    (path,) = files(directory, ARTIFACT)
    half = path.with_name(f"{path.name}.1234-abcd.tmp")
    half.write_bytes(path.read_bytes()[:40])
    path.unlink()
    assert run(directory)["lowered"] == 1
    assert half.exists()  # it may still be written
    os.utime(half, (0, 0))
    run(directory, option=2)
    assert not half.exists()
    assert len(files(directory, ARTIFACT)) == 2


def test_an_artifact_of_another_format_is_a_miss(directory):
    """Of a later version, say: it is left alone until it is replaced."""
    run(directory)
    (path,) = files(directory, ARTIFACT)
    path.write_bytes(path.read_bytes().replace(b"artifact 1", b"artifact 2", 1))
    told = run(directory)
    assert (told["lowered"], told["warnings"]) == (1, [])
    assert run(directory)["lowered"] == 0


def test_a_load_that_raises_trips_and_the_region_is_lowered(directory):
    """On the same backend; the artifact isn't tried again."""
    run(directory)
    told = run(directory, load="raises")
    assert (told["lowered"], told["load_calls"], told["loaded"]) == (1, 1, [False])
    assert told["right"]
    assert told["trips"] == ["fake it raised RuntimeError: no such format; fake, lowered again"]
    assert len(files(directory, ASIDE)) == 1
    assert run(directory)["lowered"] == 0


def test_a_load_that_raises_raises_where_the_policy_says_so(directory):
    """``on_failure = "raise"`` holds for artifacts as well."""
    run(directory)
    with pytest.raises(Exception, match="no such format"):
        run(directory, load="raises", settings={"on_failure": "raise"})


def test_a_load_may_decline(directory):
    """None: the region is lowered, without a trip, and stored again."""
    run(directory)
    told = run(directory, load="declines")
    assert (told["lowered"], told["load_calls"], told["trips"]) == (1, 1, [])


def test_a_directory_that_cant_be_written(tmp_path):
    """One warning, a note, and everything else goes on. A file stands where the directory would."""
    (tmp_path / "file").write_text("")
    directory = str(tmp_path / "file")
    told = run(directory)
    assert (told["lowered"], told["right"], told["trips"]) == (1, True, [])
    assert len([text for text in told["warnings"] if "nothing can be stored" in text]) == 1
    assert any(note.startswith("not cached: ") for note in told["notes"])
    assert run(directory)["warnings"] == []


# --- what the shipped backends do -----------------------------------------------------------------


@pytest.mark.thorough
def test_inductor_takes_its_code_from_the_cache(directory):
    """A whole training step: forward and backward are loaded, and right."""

    def f(x, y):
        return (torch.relu(x * y + 1) @ y.T).sum()

    def step(function):
        x = torch.linspace(-1, 1, 35).reshape(5, 7).requires_grad_()
        y = torch.linspace(0, 2, 35).reshape(5, 7)
        function(x, y).backward()
        return x.grad

    for loaded in (False, True):
        torch._dynamo.reset()
        torch.testing.assert_close(
            step(compiled(f, "inductor", "eager", cache_dir=directory)), step(f)
        )
        regions = last_graph("forward").regions + last_graph("backward").regions
        assert {r.loaded for r in regions if r.backend == "inductor"} == {loaded}
