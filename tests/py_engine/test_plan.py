"""The memory plan, alone: random lists of values, replayed on a memory that knows who wrote each byte."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from py_engine.ad.compile.plan import Plan, Value, plan
from py_engine.ad.memory import ALIGNMENT

# Random lists of values -----------------------------------------------------------------------------------


@st.composite
def value_lists(draw):
    """Values as a tape has them: some read earlier ones, some are views, some can be made of parts in place."""
    values: list[Value] = []
    for i in range(draw(st.integers(0, 25))):
        earlier = st.integers(max(0, i - 8), i - 1)
        reads = tuple(draw(st.lists(earlier, max_size=3))) if i else ()
        kind = draw(st.sampled_from(["plain", "plain", "plain", "view", "whole", "fixed"]))
        nbytes = draw(st.sampled_from([0, 1, 8, 64, 65, 128, 200]))
        if kind == "view" and reads:
            same = draw(st.booleans())  # a reshape, or a slice or broadcast of another size
            values.append(Value(values[reads[0]].nbytes if same else nbytes, reads[:1], view_of=reads[0]))
        elif kind == "whole" and reads:
            parts = tuple(x for x in dict.fromkeys(reads) if draw(st.booleans()))
            values.append(
                Value(sum(values[x].nbytes for x in parts) + draw(st.sampled_from([0, 8])), reads, parts=parts)
            )
        else:
            if reads and draw(st.booleans()):
                nbytes = values[reads[0]].nbytes
            over = tuple(x for x in reads if values[x].nbytes == nbytes and draw(st.booleans()))
            values.append(Value(nbytes, reads, may_overwrite=over, fixed=kind == "fixed"))
    return values


# A machine that runs a plan -------------------------------------------------------------------------------


class Machine:
    """Memory in which each byte holds the number of the value that wrote it."""

    def __init__(self, values: list[Value], planned: Plan) -> None:
        self.values, self.plan = values, planned
        self.memory: dict[object, int] = {}

    def place(self, i: int) -> tuple[object, int]:
        """The memory that value `i` lies in ("arena", or its own), and its first byte there."""
        value = self.values[i]
        if value.view_of is not None:
            return self.place(value.view_of)
        if i in self.plan.placed:
            whole = self.plan.placed[i]
            inside = [p for p in self.values[whole].parts if self.plan.placed.get(p) == whole]
            area, start = self.place(whole)
            return area, start + sum(self.values[p].nbytes for p in inside[: inside.index(i)])
        owner = self.plan.storage[i]
        if owner != i:
            return self.place(owner)
        return (i, 0) if self.values[i].fixed else ("arena", self.plan.offset[i])

    def bytes_of(self, i: int) -> list[object]:
        while self.values[i].view_of is not None:
            i = self.values[i].view_of
        area, start = self.place(i)
        return [(area, start + k) for k in range(self.values[i].nbytes)]

    def writers(self, i: int) -> set[int]:
        """The values whose writing made the contents of `i`: itself, and the parts computed inside it."""
        while self.values[i].view_of is not None:
            i = self.values[i].view_of
        return {i}.union(*(self.writers(p) for p, whole in self.plan.placed.items() if whole == i))

    def check(self, i: int) -> None:
        """The contents of `i` are what was computed, unharmed."""
        made_by = self.writers(i)
        for byte in self.bytes_of(i):
            assert self.memory.get(byte) in made_by, f"value {i} was overwritten by {self.memory.get(byte)}"

    def run(self) -> None:
        for i, value in enumerate(self.values):
            for x in value.reads:
                self.check(x)
            if value.view_of is not None:
                continue
            mine = self.bytes_of(i)
            inside = {byte for p, whole in self.plan.placed.items() if whole == i for byte in self.bytes_of(p)}
            for x in value.reads:
                shared = set(mine).intersection(self.bytes_of(x)) - inside
                assert not shared or (x in value.may_overwrite and self.bytes_of(x) == mine), (
                    f"{i} is computed over {x}"
                )
            for byte in mine:
                if byte not in inside:
                    self.memory[byte] = i
        for i, value in enumerate(self.values):
            if value.fixed:
                self.check(i)


@pytest.mark.campaign
@settings(max_examples=5 * settings.default.max_examples)
@given(value_lists(), st.booleans(), st.booleans())
def test_every_value_is_intact_whenever_it_is_read(values, in_place, reuse):
    planned = plan(values, in_place, reuse)
    note(f"{values}\n{planned}")
    Machine(values, planned).run()


@given(value_lists(), st.booleans())
def test_storages_alive_together_lie_apart_and_aligned_inside_the_arena(values, in_place):
    planned = plan(values, in_place)
    for owner, offset in planned.offset.items():
        assert offset % ALIGNMENT == 0
        assert offset + values[owner].nbytes <= planned.size
        assert planned.lifetime[owner][0] <= owner <= planned.lifetime[owner][1]
    for a, b in combinations(planned.offset, 2):
        (first_a, last_a), (first_b, last_b) = planned.lifetime[a], planned.lifetime[b]
        if first_a <= last_b and first_b <= last_a:
            end_a, end_b = planned.offset[a] + values[a].nbytes, planned.offset[b] + values[b].nbytes
            assert end_a <= planned.offset[b] or end_b <= planned.offset[a] or 0 in (values[a].nbytes, values[b].nbytes)


@given(value_lists(), st.booleans())
def test_the_arena_is_no_larger_than_without_reuse_and_no_smaller_than_what_is_alive(values, in_place):
    planned, apart = plan(values, in_place), plan(values, in_place, reuse=False)
    assert planned.storage == apart.storage and planned.lifetime == apart.lifetime
    rounded = {i: -(-values[i].nbytes // ALIGNMENT) * ALIGNMENT for i in planned.offset}
    assert planned.size <= apart.size == sum(rounded.values())
    for step in range(len(values)):
        alive = sum(rounded[i] for i, (first, last) in planned.lifetime.items() if first <= step <= last)
        assert alive <= planned.size


@given(value_lists(), st.booleans())
def test_views_share_parts_lie_inside_and_fixed_values_keep_to_themselves(values, in_place):
    planned = plan(values, in_place)
    for i, value in enumerate(values):
        owner = planned.storage[i]
        assert planned.storage[owner] == owner
        if value.view_of is not None:
            assert owner == planned.storage[value.view_of]
        elif i in planned.placed:
            assert i in values[planned.placed[i]].parts
            assert owner == planned.storage[planned.placed[i]]
        elif value.fixed:
            assert owner == i and i not in planned.offset
        elif owner != i:
            assert in_place and any(planned.storage[x] == owner for x in value.may_overwrite)


@given(value_lists())
def test_a_plan_depends_on_nothing_but_the_values(values):
    assert plan(values) == plan(list(values))


# Cases by hand --------------------------------------------------------------------------------------------


def chain(n, nbytes=64, **options):
    """Each value computed from the one before."""
    return [Value(nbytes, fixed=True)] + [Value(nbytes, (i,), **options) for i in range(n)]


def test_a_chain_needs_two_buffers():
    assert plan(chain(10)).size == 2 * 64


def test_a_chain_in_place_needs_one():
    values = [Value(64, fixed=True)] + [Value(64, (i,), may_overwrite=(i,)) for i in range(10)]
    planned = plan(values)
    assert planned.size == 64
    assert planned.storage == (0,) + (1,) * 10  # the input itself is not overwritten


def test_a_value_read_again_later_is_not_overwritten():
    values = [Value(64, fixed=True), Value(64, (0,)), Value(64, (1,), may_overwrite=(1,)), Value(64, (1, 2))]
    assert plan(values).storage[2] == 2


def test_a_value_read_later_through_a_view_is_not_overwritten():
    values = [
        Value(64, fixed=True),
        Value(64, (0,)),
        Value(64, (1,), view_of=1),
        Value(64, (1,), may_overwrite=(1,)),
        Value(64, (2, 3)),
    ]
    assert plan(values).storage[3] == 3


def test_an_operand_seen_twice_at_different_places_is_not_overwritten():
    # x + x.T in place would read elements that are written already.
    values = [Value(64, fixed=True), Value(64, (0,)), Value(64, (1,), view_of=1), Value(64, (1, 2), may_overwrite=(1,))]
    assert plan(values).storage[3] == 3


def test_a_value_of_another_size_is_not_overwritten():
    values = [Value(64, fixed=True), Value(32, (0,)), Value(64, (1,), may_overwrite=(1,))]
    assert plan(values).storage[2] == 2


def test_parts_live_in_their_whole_from_the_first_one_on():
    values = [
        Value(64, fixed=True),
        Value(64, (0,)),
        Value(64, (0,)),
        Value(128, (1, 2), parts=(1, 2)),
        Value(8, (3,), fixed=True),
    ]
    planned = plan(values)
    assert planned.placed == {1: 3, 2: 3}
    assert planned.lifetime == {3: (1, 4)}
    assert planned.size == 128


def test_wholes_may_be_parts_themselves():
    values = [Value(64), Value(64), Value(128, (0, 1), parts=(0, 1)), Value(64), Value(192, (2, 3), parts=(2, 3))]
    planned = plan(values)
    assert planned.storage == (4,) * 5
    assert planned.lifetime == {4: (0, 4)}


def test_gaps_that_meet_are_joined():
    # Two of 64 bytes die, and one of 128 takes their place.
    values = [Value(64), Value(64), Value(8, (0, 1), fixed=True), Value(128), Value(8, (3,), fixed=True)]
    assert plan(values).size == 128


def test_the_last_gap_grows_instead_of_leaving_a_hole():
    values = [Value(64), Value(8, (0,), fixed=True), Value(256), Value(8, (2,), fixed=True)]
    assert plan(values).size == 256


def test_no_values_need_no_memory():
    assert plan([]) == Plan((), {}, {}, 0, {})


@pytest.mark.parametrize("n", [1, 63, 64, 65])
def test_sizes_are_rounded_to_cache_lines(n):
    planned = plan([Value(n), Value(n), Value(8, (0, 1), fixed=True)])
    assert sorted(planned.offset.values()) == [0, -(-n // 64) * 64]


def test_a_long_chain_is_planned():
    assert plan(chain(100_000)).size == 2 * 64
