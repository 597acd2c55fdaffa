"""The op record: everything the engine knows about one operation, in one place; and its use in programs, `Equation`.

An op is called with tensors, arrays and numbers.  Called eagerly it computes at once; called while a function is
traced it returns a symbolic tensor, which the planner and the tape turn into a bound call later.  Both use the
same record, and so do the gradient tests and the op reference in the documentation.

Contract of a kernel: `kernel(*inputs, out, **attrs)` writes every element of `out`, reads and writes nothing
else, and allocates as little as numpy allows.  `out` may be the memory of an input only for the inputs listed in
`overwrites`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from operator import add
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from py_engine.ad import mutation
from py_engine.ad.mutation import SMALL, Versions, watch
from py_engine.ad.state import STATE, entering, restoring
from py_engine.ad.tensor import COMPLEX, FLOATS, Array, Literal, Node, Operand, Result, Tensor, plain_array, real_array
from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError, ShapeError

Shape: TypeAlias = tuple[int, ...]
Infer: TypeAlias = Callable[..., Any]
Rule: TypeAlias = Callable[..., Tensor | None]
Pullback: TypeAlias = Callable[[Sequence[Tensor | None], Sequence[bool], Any], Sequence[Tensor | None]]
Tangents: TypeAlias = Sequence[Tensor | None]
Partial: TypeAlias = "Tensor | float | tuple[Tensor, Tensor]"
Call: TypeAlias = "partial[Any]"
Scratch: TypeAlias = Callable[[Shape, Any], Array]
Batch: TypeAlias = "Callable[[Op, int, Sequence[bool], Sequence[Tensor], Mapping[str, Any]], Any]"
Sparsity: TypeAlias = "Callable[..., Sequence[tuple[Array, Array] | None] | None]"
Check: TypeAlias = "tuple[Op, tuple[Tensor, ...], Mapping[str, Any]]"
Simplify: TypeAlias = "Callable[[Equation, Mapping[int, Equation]], Tensor | Equation | None]"
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")

_new, _empty = Tensor.__new__, np.empty  # looked up once: an eager op has no microsecond to lose

NO_ATTRS: Mapping[str, Any] = {}


def shared_number(value: float, dtype: Any) -> Literal:
    """Return a number that graphs share: nobody may write to it."""
    array = np.full((), value, dtype)
    array.flags.writeable = False
    return Literal(array)


ZEROS = {dtype: shared_number(0, dtype) for dtype in FLOATS}
"""The number zero of each float dtype; ops may know it by its array."""

TABLE: dict[str, Op] = {}
"""Every op by name."""

NUMPY: dict[Any, Callable[..., Any]] = {}
"""numpy's functions and ufuncs, each with the op that stands in for it on tensors."""


@dataclass(frozen=True, eq=False, slots=True)
class Op:
    """One operation.

    Attributes:
        name: the name in the table, in messages and in `print(f.source)`.
        infer: `infer(*inputs, **attrs)` gives the result's shape and dtype without running it, or raises; of an op with
            several results a list of them.
        several: whether it has several results: then it is applied by `apply_several`, a kernel writes
            `kernel(*inputs, *outs, **attrs)`, and a view returns as many views, each of the
            input of its place, which no rule reads.
        narrow: `narrow(attrs, needed)` for an op with several results, of which only the first may be needed: the
            attributes that compute no more than these.
        kernel: `kernel(*inputs, out, **attrs)` computes into `out`.
        bind: `bind(inputs, out, scratch, **attrs)` gives the calls that do so, for kernels with something to
            prepare once; `scratch(shape, dtype)` is memory that a call may use and that it never relies on. A call is
            a `functools.partial`: a function and its operands, the only arrays that it reads and writes.
        view: `view(x, **attrs)` gives the result as a view of its input's memory: no call at all.
        vjp: a tuple with one rule for each input, `rule(g, y, *inputs, **attrs)`, written in ops; `no_gradient` for an
            input that counts as a constant. Or one rule for all, `rule(cotangents, needs_grad, node)`, for any number
            of inputs, or of results: from the gradient by each result, or None, and whether each input needs one, to
            one gradient per input, or None; `node` is the only result, or the `Node` of several. None, or None for
            an input: the rule is missing, and a gradient that needs it raises.
        opaque: whether its rules may run code of the user's own: they may read and write whatever they are given.
        jvp: `jvp(tangents, y, *inputs, **attrs)`, written in ops, with None for an input without a
            tangent, and as the result where that is zero.
        batch: `batch(op, count, mapped, inputs, attrs)` applies the op to `count` samples at once, written in ops: each
            input that is `mapped` is (count, *shape), and so is the result; of an op with several results it returns
            them and, as a second list, which of them have that axis. Most ops share the rule of a family (`leading`,
            `along_axes`, `by_samples` in `ops/shape.py`); an elementwise op needs none. None, or a rule that returns
            None, applies the op sample by sample, see `vmap.ONE_BY_ONE`.
        sparsity: `sparsity(*inputs, **attrs)` tells which elements of each input an element of the result may depend
            on: for each input, flat positions in the result and in the input, pair by pair (two arrays that broadcast
            together), or None where it depends on none of it. Views, elementwise ops, and those batched `along_axes`
            need none; of others that lack it, or for which it gives None, each element depends on all, see
            `ad.sparse`.
        constant: whether the result counts as a constant on purpose (a comparison, a random mask): a
            gradient ends there, and the op has no rules.
        overwrites: the inputs whose memory `out` may be.
        elementwise: whether every result element depends on one element of each input, found by broadcasting.
        accepts: `accepts(array, **attrs)` tells whether the kernel, or the view, handles that memory layout; where not,
            the input is copied into C order first. None accepts every layout.
        strided: whether rows that lie apart, as those of a part of a larger array do, are among what it accepts, and
            whether its result may be such a part.
        in_order: of a view: whether it has all elements of its input in their order in memory.
        slice_index: `slice_index(**attrs)` for an op whose result is a part of its input: the basic index of that part.
            Gradients by such parts are assembled at once.
        places: `places(**attrs)` for an op that puts its inputs side by side into its result: numpy's index of each
            one's place, where a tape may compute it; none where places overlap or leave gaps.
        sum_rows: `sum_rows(shards, out, zeroed, **attrs)` for an op that adds rows into a matrix of zeros, from its
            inputs' arrays on each shard of a batch: the calls that compute the sum over the shards in `out`, without a
            matrix for each. In two lists: for each shard those that leave its rows and, unless `out` is `zeroed`, zero
            its share of that; then, for each thread, those that add its share of the sum.
        reads_rows: whether of a matrix of floats it reads those rows alone whose numbers are in its input of integers.
        keeps_ids: whether all ids in its result are in its input.
        simplify: `simplify(equation, made)` gives an equal of an equation that is less to compute: a tensor, or an
            equation with the same outputs; None where it knows none. `made` has the equation that makes each variable,
            by its id.
        checks: `checks(*inputs, **attrs)` for an op that accepts only some values: the op that checks them and
            computes nothing (see `check_op`), its inputs and its attributes; None where these inputs need no check. A
            tape runs it where it does not run this op, since no result needs it.
        commutes: whether the result is the same, to the last bit, with its two inputs exchanged.
        any_order: whether the terms of a sum of such ops may be added in any order.
        join: `join(terms)` for results of it that are traced, and terms of one gradient: as few terms of the same sum
            that are less to compute.
        scalar: the value for single float64 numbers as Python, with `{0}`, `{1}` for the operands, or a function
            that gives it for an equation; see `straight_line`.
        random: each call draws new values, so equal calls must not be merged.
        couples_batch: whether the samples of a batch affect each other's results (batch normalisation does; a
            mean over the batch does not count, since it is a weighted sum over shards).
        flops: `flops(*inputs, **attrs)`: how many additions, multiplications and functions of single numbers the op is
            made of, for inputs of these shapes; see `Equation.flops` for what is derived without it.
        bytes: `bytes(*inputs, **attrs)`: the bytes that it has to read and write, where these are not all of its
            operands and results.
        product: whether `flops` are those of sums of products: `flops` is what they take one by one.
        steps: whether it is a product for each of many steps, and other calls between them, which count where threads
            are to share them.
        skipped: `skipped(*inputs, **attrs)`: which share of the result's elements a product that reads it need not
            multiply, since they are known to be zeros, or may repeat others.
        unread: `unread(*inputs, **attrs)`: which share of its first input's elements need not be computed one by one
            for it, since it does not read them, or adds them up.
        fused: whether only the technique `fuse` makes it, in place of other ops. Programs are differentiated before
            that, so that it has no rules.
        doc: one line for the op reference.
        reads: which inputs' values the rules use, for each choice of inputs that are differentiated by; kept once it
            was found out (see `Op.guard`), so that it must not depend on shapes or attributes.
        pull: `pull(cotangents, needs_grad, node)`: the vjp in its one form, whichever was given.
        alike: whether the result has shape and dtype of the inputs, where these are floats and equal in both.
        reads_nothing: whether that is known to be none, whichever inputs are differentiated by.
    """

    name: str
    infer: Infer
    kernel: Callable[..., Any] | None = None
    bind: Callable[..., Sequence[Call]] | None = None
    view: Callable[..., Any] | None = None
    vjp: tuple[Rule | None, ...] | Pullback | None = None
    opaque: bool = False
    several: bool = False
    narrow: Callable[..., Mapping[str, Any]] | None = None
    jvp: Callable[..., Any] | None = None
    batch: Batch | None = None
    sparsity: Sparsity | None = None
    constant: bool = False
    overwrites: tuple[int, ...] = ()
    elementwise: bool = False
    accepts: Callable[..., bool] | None = None
    strided: bool = False
    in_order: bool = False
    slice_index: Callable[..., Any] | None = None
    places: Callable[..., Sequence[Any]] | None = None
    sum_rows: Callable[..., tuple[list[list[Call]], list[list[Call]]]] | None = None
    reads_rows: bool = False
    keeps_ids: bool = False
    simplify: Simplify | None = None
    checks: Callable[..., Check | None] | None = None
    commutes: bool = False
    any_order: bool = False
    join: Callable[[list[Tensor]], list[Tensor]] | None = None
    scalar: str | Callable[[Equation], str] | None = None
    random: bool = False
    couples_batch: bool = False
    flops: Callable[..., int] | None = None
    bytes: Callable[..., int] | None = None
    product: bool = False
    steps: bool = False
    skipped: Callable[..., float] | None = None
    unread: Callable[..., float] | None = None
    fused: bool = False
    doc: str = ""
    reads: dict[Any, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)
    reads_nothing: bool = field(default=False, init=False, repr=False)
    alike: bool = field(default=False, init=False, repr=False)
    nin: int = field(default=0, init=False, repr=False)  # how many inputs a ufunc has
    pull: Pullback = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.several and isinstance(self.vjp, tuple):
            raise ValueError(f"{self.name}: an op with several results needs one vjp that takes all their cotangents")
        object.__setattr__(self, "alike", self.infer in (infer_float, infer_real, infer_elementwise, infer_number))
        object.__setattr__(self, "nin", self.kernel.nin if isinstance(self.kernel, np.ufunc) else 0)
        object.__setattr__(self, "pull", _pullback(self.vjp))

    def __call__(self, *operands: Operand, **attrs: Any) -> Tensor:
        """Apply the op to tensors, arrays and numbers."""
        for x in operands:
            if x.__class__ is not Tensor:
                return self.apply(as_tensors(operands), attrs)
        return self.apply(operands, attrs)  # type: ignore[arg-type]  # checked above

    def apply(self, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any]) -> Tensor:
        """Apply the op to tensors: eagerly, or symbolically while a function is traced."""
        if self.nin and len(inputs) != self.nin:  # a ufunc would take one more as where its result goes
            raise TypeError(f"{here(self.name)}: expected {self.nin} operands, got {len(inputs)}")
        state = STATE.__dict__  # this thread's, looked up once
        trace, symbolic = state["trace"], state["symbolic"]
        level = 0
        alike = self.alike  # nothing is to be inferred
        if alike:
            shape, dtype = inputs[0].shape, inputs[0].dtype
        arrays = []
        for x in inputs:
            arrays.append(x.data)
            if x.data is None:
                symbolic = True
            if x.level > level:
                level = x.level
            if alike and (x.dtype is not dtype or x.shape != shape):
                alike = False
        if not alike or dtype not in FLOATS:
            alike = False
            try:
                shape, dtype = self.infer(*inputs, **attrs)
            except SeveralDTypes as error:
                return self.apply(error.converted(inputs), attrs)
            except (ShapeError, DTypeError) as error:
                raise type(error)(f"{here(self.name)}: {error}") from None
        if level and (self.constant or not state["grad_enabled"] or dtype not in FLOATS):
            level = 0
        result = _new(Tensor)
        result.shape = shape
        result.dtype = dtype
        result.grad = None
        result.name = ""
        result.scope = state["scope"]
        result.level = level
        if symbolic:
            result.data = None
        elif self.kernel is not None:
            if self.accepts is not None and not self.nin:  # numpy's own functions take all
                arrays = self._accepted(arrays, attrs)
            if attrs:
                result.data = out = _empty(shape, dtype)
                self.kernel(*arrays, out, **attrs)
            elif alike and self.nin and len(shape) == 1:  # a vector has one order in memory: numpy may allocate it
                result.data = out = self.kernel(*arrays)
                if out.dtype is not dtype or out.shape != shape:  # the kernel's, or an array reshaped in place
                    result.data = out = _empty(shape, dtype)
                    self.kernel(*arrays, out)
            else:
                result.data = out = _empty(shape, dtype)
                self.kernel(*arrays, out)
        elif self.view is not None:
            result.data = self.view(*arrays, **attrs)
            if not level and trace is None and (inputs[0].op is not None or not result.data.flags.writeable):
                result.data = result.data.view()  # a gradient may need what it shows, and it has no op that says so
                result.data.flags.writeable = False
        else:
            (result.data,) = self.compute(arrays, [(shape, dtype)], attrs)
        result.versions = None
        if level or symbolic or trace is not None:
            result.op, result.inputs, result.attrs = self, inputs, attrs
            if level and not symbolic and not self.reads_nothing:
                for x in inputs:
                    if x.op is None or x.op.view is not None:  # given, or a view of what was given
                        result.versions = self.guard(inputs, attrs)
                        break
            if trace is not None:
                trace.append(result)
                mutation.note_given(inputs)
        else:
            result.op, result.inputs, result.attrs = None, (), NO_ATTRS
        return result

    def apply_several(self, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Apply an op with several results to tensors: eagerly, or symbolically while a function is traced."""
        kinds = self.infer(*inputs, **attrs)
        symbolic = STATE.symbolic or any(x.data is None for x in inputs)
        if self.view is not None and not symbolic and STATE.trace is None:
            # No rule reads what is passed through: how that was computed is not kept.
            passed = [Tensor(x.data) for x in inputs[: len(kinds)]]  # type: ignore[arg-type]  # not None
            inputs = (*passed, *inputs[len(kinds) :])
        level = max(x.level for x in inputs) if inputs and STATE.grad_enabled and not self.constant else 0
        node = Node(self, inputs, attrs, kinds, level)
        if symbolic:
            node.variables = tuple([Result(node, i) for i in range(len(kinds))])
        else:
            node.values = self.compute([x.data for x in inputs], kinds, attrs)
            if not level and STATE.trace is None:
                return tuple([Tensor(array) for array in node.values])
            read = inputs if self.view is None else inputs[len(kinds) :]
            if level and any(x.op is None or x.op.view is not None for x in read):
                node.versions = self.guard(read, attrs)
        if STATE.trace is not None:
            STATE.trace.append(node)
            mutation.note_given(inputs)
        return tuple([node.result(i) for i in range(len(kinds))])

    def _accepted(self, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> list[Any]:
        """Return these arrays in layouts that the op takes: themselves, or copies in C order."""
        assert self.accepts is not None
        return [a if self.accepts(a, **attrs) else np.ascontiguousarray(a).reshape(a.shape) for a in arrays]

    def compute(
        self, arrays: Sequence[Any], kinds: Sequence[tuple[Shape, Any]], attrs: Mapping[str, Any]
    ) -> Sequence[Array]:
        """Return the results for these arrays, of these shapes and dtypes, in fresh memory unless the op is a view."""
        if self.view is not None:
            found = self.view(*arrays, **attrs)
            return found if self.several else (found,)
        if self.accepts is not None and not self.nin:
            arrays = self._accepted(arrays, attrs)
        outs = [_empty(shape, dtype) for shape, dtype in kinds]
        if self.kernel is not None:
            self.kernel(*arrays, *outs, **attrs)
        else:
            for call in self.calls(arrays, outs, np.empty, attrs):
                call()
        return outs

    def calls(
        self, arrays: Sequence[Array], outs: Sequence[Array], scratch: Scratch, attrs: Mapping[str, Any]
    ) -> Sequence[Call]:
        """Return the calls that compute the op from these arrays into `outs`, bound and ready to repeat."""
        if self.bind is not None:
            return self.bind(arrays, *outs, scratch, **attrs)
        assert self.kernel is not None, f"{self.name} has neither kernel nor bind"
        return [partial(self.kernel, *arrays, *outs, **attrs)]

    def guard(self, inputs: Sequence[Tensor], attrs: Mapping[str, Any]) -> Versions | None:
        """Return the versions of those inputs that the op's rules read, and that were given, not computed."""
        # Small functions are nearly all overhead: every line here is measured.
        if len(inputs) == 1:
            key: Any = True
        elif len(inputs) == 2:
            key = inputs[0].level > 0, inputs[1].level > 0
        else:
            key = tuple([x.level > 0 for x in inputs])
        read = self.reads.get(key)
        if read is None:
            read = self._read_first(inputs, attrs, key)
        if len(read) == 1:  # nearly always, and without a loop
            x = inputs[read[0]]
            if x.op is None and x.__class__ is not Literal:
                data = x.data
                assert data is not None
                return ((x, data.tobytes() if data.nbytes <= SMALL else mutation.version_of(data, not self.opaque)),)
        found: Versions | None = None
        last = None
        for i in read:
            x = base = inputs[i]
            if x is last:
                continue
            last = x
            while base.op is not None and base.op.view is not None:
                base = base.inputs[base.index if isinstance(base, Result) else 0]
            if base.op is None and base.__class__ is not Literal:
                data = x.data
                assert data is not None
                version = data.tobytes() if data.nbytes <= SMALL else mutation.version_of(data, not self.opaque)
                found = ((x, version),) if found is None else (*found, (x, version))
        return found

    def _read_first(self, inputs: Sequence[Tensor], attrs: Mapping[str, Any], key: Any) -> tuple[int, ...]:
        self.reads[key] = read = self.operands_read(inputs, attrs, [x.requires_grad for x in inputs])
        if not read and isinstance(self.vjp, tuple):  # a rule for any number of inputs may read others of more
            any_float = [x.dtype in FLOATS for x in inputs]
            object.__setattr__(self, "reads_nothing", not self.operands_read(inputs, attrs, any_float))
        return read

    @restoring
    def operands_read(
        self, inputs: Sequence[Tensor], attrs: Mapping[str, Any], needs_grad: Sequence[bool]
    ) -> tuple[int, ...]:
        """Return the numbers of the inputs whose values the rules use, where some are differentiated by.

        It is found by tracing the rules, vjp and jvp.
        """
        everything = tuple(range(len(inputs)))
        if self.opaque:
            return everything
        try:
            with entering(trace=[], symbolic=True, grad_enabled=True):
                own = [Tensor.symbol(x.shape, x.dtype) for x in inputs]
                y = self.apply(tuple(own), attrs)
                found = [*self.pull((Tensor.symbol(y.shape, y.dtype),), needs_grad, y)]
                if self.jvp is not None:
                    tangents = [
                        Tensor.symbol(x.shape, x.dtype) if needed else None
                        for x, needed in zip(own, needs_grad, strict=True)
                    ]
                    found.append(self.jvp(tangents, y, *own, **attrs))
        except Exception:  # a rule that looks at values, or that numpy refuses: it may read whatever it is given
            return everything
        y.inputs = ()  # what the rules compute from the result, they do not read from the operands
        used: set[int] = set()
        stack = [x for x in found if x is not None]
        while stack:
            x = stack.pop()
            if id(x) not in used:
                used.add(id(x))
                stack.extend(x.inputs)
        return tuple(i for i, x in enumerate(own) if id(x) in used)


def _pullback(vjp: tuple[Rule | None, ...] | Pullback | None) -> Pullback:
    """Return the one form of a vjp, `pull(cotangents, needs_grad, node)`."""
    if vjp is None:

        def missing(cotangents: Tangents, needs_grad: Sequence[bool], node: Any) -> Tangents:
            raise _missing_rule(node, needs_grad.index(True))

        return missing
    if not isinstance(vjp, tuple):
        return vjp
    rules = tuple([_raising(i) if rule is None else rule for i, rule in enumerate(vjp)])
    # Small functions are nearly all overhead: most ops have one input or two, and do without a loop.
    if len(rules) == 1:
        (only,) = rules

        def one(cotangents: Tangents, needs_grad: Sequence[bool], node: Tensor) -> Tangents:
            (x,), attrs = node.inputs, node.attrs
            return (only(cotangents[0], node, x, **attrs) if attrs else only(cotangents[0], node, x),)

        return one
    if len(rules) == 2:
        first, second = rules

        def two(cotangents: Tangents, needs_grad: Sequence[bool], node: Tensor) -> Tangents:
            g, (a, b), attrs = cotangents[0], node.inputs, node.attrs
            return (
                first(g, node, a, b, **attrs) if needs_grad[0] else None,
                second(g, node, a, b, **attrs) if needs_grad[1] else None,
            )

        return two

    def each(cotangents: Tangents, needs_grad: Sequence[bool], node: Tensor) -> Tangents:
        g, inputs, attrs = cotangents[0], node.inputs, node.attrs
        return [
            rule(g, node, *inputs, **attrs) if needed else None for rule, needed in zip(rules, needs_grad, strict=True)
        ]

    return each


def _raising(i: int) -> Rule:
    def rule(g: Tensor, y: Tensor, *inputs: Tensor, **attrs: Any) -> None:
        raise _missing_rule(y, i)

    return rule


def _missing_rule(node: Tensor | Node, i: int) -> NotDifferentiableError:
    assert node.op is not None
    what = (
        "it is made by the technique 'fuse' and has no rule; switch that off to differentiate once more"
        if node.op.fused
        else f"it has no vjp rule for its input {i}; give its record one, or constant=True if no gradient is to pass it"
    )
    return NotDifferentiableError(f"a gradient is taken through {described(node)}, but {what}")


def described(node: Tensor | Node | Equation) -> str:
    """Return the name of a node's op, and of the layer that it belongs to, for messages."""
    assert node.op is not None
    return f"{node.op.name!r} in layer {node.scope!r}" if node.scope else repr(node.op.name)


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """An op with its inputs, its attributes, and the variables that are its results.

    Attributes:
        scope: the layer that it belongs to, for messages.
    """

    op: Op
    inputs: tuple[Tensor, ...]
    attrs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    scope: str

    @classmethod
    def of(cls, op: Op, inputs: tuple[Tensor, ...], attrs: Mapping[str, Any], scope: str) -> Equation:
        """Return an op on these inputs, with new variables as its results."""
        kinds = op.infer(*inputs, **attrs)
        outputs = [Tensor.symbol(shape, dtype, scope=scope) for shape, dtype in (kinds if op.several else [kinds])]
        return cls(op, inputs, attrs, tuple(outputs), scope)

    @property
    def output(self) -> Tensor:
        """The only result."""
        (found,) = self.outputs
        return found

    @property
    def flops(self) -> int:
        """Arithmetic operations on numbers; by default one for each element of an elementwise result, none for views.

        Raises:
            ConfigurationError: the op's record does not say, as that of a fused op or of a loop.
        """
        if self.op.flops is not None:
            return self.op.flops(*self.inputs, **self.attrs)
        if self.op.view is not None:
            return 0
        if not self.op.elementwise:
            raise ConfigurationError(f"the op {described(self)} does not say how many operations it is made of")
        return self.output.size

    @property
    def bytes(self) -> int:
        """Bytes that it moves; by default each operand is read and each result written once, and views move none."""
        if self.op.bytes is not None:
            return self.op.bytes(*self.inputs, **self.attrs)
        return 0 if self.op.view is not None else sum(map(nbytes, (*self.inputs, *self.outputs)))

    def reading(self, inputs: tuple[Tensor, ...]) -> Equation:
        """Return the same op with other inputs."""
        if all(a is b for a, b in zip(inputs, self.inputs, strict=True)):
            return self
        return Equation(self.op, inputs, self.attrs, self.outputs, self.scope)


def nbytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return x.size * x.dtype.itemsize


def numbered(shape: Shape) -> Array:
    """Return an array of this shape whose elements are their own flat positions."""
    return np.arange(math.prod(shape)).reshape(shape)


def one_to_one(x: Tensor, **attrs: Any) -> list[tuple[Array, Array]]:
    """The `sparsity` of an op of one input whose elements each depend on the one in their place."""
    return [(numbered(x.shape), numbered(x.shape))]


def per_element(count: int) -> Callable[..., int]:
    """Return the `flops` of an op that takes `count` for each element of its first input; 0: it only moves them."""
    return lambda x, *others, **attrs: count * x.size


def per_matrix(thirds: int) -> Callable[..., int]:
    """Return the `flops` of an op on n × n matrices, (..., m, n): `thirds` thirds of m · n², for each of them."""
    return lambda x, *others, **attrs: thirds * x.size * x.shape[-1] // 3


def c_ordered(x: Array, **attrs: Any) -> bool:
    """Whether the elements lie in C order without gaps: what kernels that flatten their inputs accept."""
    return x.flags.c_contiguous


def no_gradient(*args: Any, **attrs: Any) -> None:
    """The vjp rule of an input that counts as a constant: labels, a condition, the operand that a maximum's place
    is found in; or whose derivative another input's rule contains."""


def register(op: Op, *stands_in_for: Any) -> Op:
    """Enter an op into the table, and as the stand-in for the given numpy functions.

    Raises:
        ValueError: there is one of that name; a rule is missing, and the record does not say that the op, or the
            input, counts as a constant, or that the op is made after differentiation (`fused`); or such an op, or a
            constant has rules.
    """
    if op.name in TABLE:
        raise ValueError(f"there is an op {op.name!r} already")
    if (op.constant or op.fused) and (op.vjp is not None or op.jvp is not None):
        what = "constant" if op.constant else "fused"
        raise ValueError(f"the op {op.name!r} is {what}, so it must not have vjp or jvp rules")
    if not op.constant and not op.fused:
        if op.vjp is None or (isinstance(op.vjp, tuple) and None in op.vjp):
            raise ValueError(
                f"the op {op.name!r} lacks a vjp rule; give one for each input (no_gradient for an input that counts "
                "as a constant), or constant=True if the whole result does"
            )
        if op.jvp is None:
            raise ValueError(f"the op {op.name!r} lacks a jvp rule; give one, or constant=True")
    TABLE[op.name] = op
    for function in stands_in_for:
        NUMPY[function] = op
    return op


def _registered(make: Callable[P, Op]) -> Callable[P, Op]:
    return lambda *args, **fields: register(make(*args, **fields))


define = _registered(Op)
"""Make an op of the fields of its record, and enter it into the table; see `register`."""


CONSTANT: set[Any] = set()
"""numpy's functions whose stand-ins are made of ops, and have no derivative on purpose."""


def implements(*functions: Any, constant: bool = False) -> Callable[[F], F]:
    """Enter a function as the stand-in for numpy's functions on tensors.

    Args:
        functions: numpy's.
        constant: whether the result counts as a constant on purpose, as that of a comparison.
    """

    def decorate(function: F) -> F:
        for numpy_function in functions:
            NUMPY[numpy_function] = function
            if constant:
                CONSTANT.add(numpy_function)
        return function

    return decorate


def as_tensors(operands: Sequence[Operand]) -> tuple[Tensor, ...]:
    """Turn operands into tensors; a number takes the float dtype of the tensors and arrays beside it.

    numpy's scalars count as numbers, so that `x / np.sqrt(64)` keeps a float32 `x` float32. Beside integers
    alone, whole numbers take theirs; truth values stay such where there is nothing else.

    Raises:
        DTypeError: an operand is no number and no array of numbers, or a number does not fit the dtype beside it.
        ShapeError: nested lists of different lengths.
    """
    dtype: Any
    if len(operands) == 2:  # nearly always a tensor and a number
        a, b = operands
        if a.__class__ is Tensor and a.dtype in FLOATS:
            if b.__class__ is float:
                return a, Literal(np.asarray(b, a.dtype))
            if b.__class__ is int:
                return a, _number(b, a.dtype)
        elif b.__class__ is Tensor and b.dtype in FLOATS:
            if a.__class__ is float:
                return Literal(np.asarray(a, b.dtype)), b
            if a.__class__ is int:
                return _number(a, b.dtype), b
    arrays = [x if isinstance(x, Tensor) else _operand(x) for x in operands]
    for x in arrays:
        if isinstance(x, (Tensor, np.ndarray)) and x.dtype in FLOATS:
            dtype = x.dtype
            break
    else:
        # Beside integers and truth values the dtype of numpy's whole numbers counts, as that of an array does.
        if any(isinstance(x, (Tensor, np.ndarray)) for x in arrays):
            arrays = [Literal(np.asarray(x)) if isinstance(x, np.integer) else x for x in arrays]
        dtype = _dtype_without_floats(arrays)
    return tuple(
        [x if isinstance(x, Tensor) else Tensor(x) if isinstance(x, np.ndarray) else _number(x, dtype) for x in arrays]
    )


def _operand(x: Any) -> Any:
    """Return an operand that is no tensor as an array of numbers, or as a number."""
    if isinstance(x, np.ndarray):
        return real_array(x)
    if isinstance(x, (int, float, np.number, np.bool_)):
        if isinstance(x, np.complexfloating):
            raise DTypeError(COMPLEX)
        return x
    if np.isscalar(x):
        raise DTypeError(COMPLEX if isinstance(x, complex) else f"expected a number or an array of numbers, got {x!r}")
    if isinstance(x, (list, tuple)) and _holds_tensors(x):
        return NUMPY[np.stack](as_tensors(x))
    array = real_array(plain_array(x), x)
    if isinstance(x, (list, tuple)):
        watch(x, "a list")
    return array


def _holds_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, (list, tuple)) and any(map(_holds_tensors, x)))


def _number(x: Any, dtype: Any) -> Literal:
    if x.__class__ is not float:  # which becomes an infinity where it is too large
        try:
            wraps = isinstance(x, np.integer) and dtype.kind in "iu"
            return Literal(np.asarray(int(x) if wraps else x, dtype))
        except OverflowError:
            raise DTypeError(f"the number {x} does not fit {dtype}") from None
    return Literal(np.asarray(x, dtype))


def _dtype_without_floats(operands: Sequence[Any]) -> np.dtype[Any]:
    arrays = [x.dtype for x in operands if isinstance(x, (Tensor, np.ndarray))]
    numbers = [x for x in operands if not isinstance(x, (Tensor, np.ndarray))]
    if all(isinstance(x, (bool, np.bool_)) or getattr(x, "dtype", None) == np.bool_ for x in operands):
        return np.dtype(np.bool_)
    if not arrays:
        return np.dtype(np.float64)
    found = np.result_type(*arrays, *numbers)
    return found if found in FLOATS or found.kind in "iub" else np.dtype(np.float64)


def as_tensor(operand: Operand) -> Tensor:
    """Turn one operand into a tensor."""
    return operand if isinstance(operand, Tensor) else as_tensors((operand,))[0]


# Checks of values -----------------------------------------------------------------------------------------
#
# An op that accepts only some values looks at them in each of its calls, eagerly and in every replay: a tape's inputs
# change. A check is a call like the others, bound before them.


def here(name: str) -> str:
    """Return the name of an op, and of the layer whose ops are being made or bound, for messages."""
    return f"{name} in layer {STATE.scope!r}" if STATE.scope else name


def all_below(array: Array, limit: int) -> bool:
    """Whether all of these integers are in [0, limit): read as unsigned numbers, negative ones are large."""
    bits = 8 * array.itemsize
    if array.dtype.kind == "i":
        array, limit = array.view(_UNSIGNED[bits]), min(limit, 1 << (bits - 1))
    # By argmax: a reduction allocates an iterator in every replay.
    return not array.size or array.item(array.argmax()) < limit


CHECKS: set[Callable[..., None]] = set()
"""The functions of all checks: a tape makes equal ones, of the same array, once."""


COUNTED: dict[Callable[..., None], Callable[..., int]] = {}
"""What takes a call's arguments and gives the multiplications and additions of the products in it, by the function that
is called: of functions that multiply other matrices than they are given. See `compile.products.operations`."""


def check_op(name: str, check: Callable[..., None], batch: Batch) -> Op:
    """Return an op that only checks: `check(*inputs, **attrs, where)` raises for values that are not accepted.

    Its result has no elements. `where` is `here()` of the attribute `of`, the name of the op that needs the values;
    `batch` is its rule for many samples, see `Op`.
    """

    def infer(*inputs: Tensor, **attrs: Any) -> tuple[Shape, Any]:
        return (0,), np.dtype(np.bool_)

    def bind(arrays: Sequence[Array], out: Array, scratch: Scratch, of: str, **attrs: Any) -> Sequence[Call]:
        return [partial(check, *arrays, **attrs, where=here(of))]

    def itself(*inputs: Tensor, **attrs: Any) -> Check:
        return op, inputs, attrs

    CHECKS.add(check)
    doc = "a check of values that computes nothing"
    op = Op(name, infer, bind=bind, constant=True, checks=itself, batch=batch, doc=doc)
    return op


_UNSIGNED = {bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}


# Elementwise ops ------------------------------------------------------------------------------------------


def broadcast(inputs: Sequence[Tensor]) -> Shape:
    """Return the shape that numpy's broadcasting gives.

    Raises:
        ShapeError: the shapes do not fit; the message lists them all.
    """
    try:
        return _broadcast(*[x.shape for x in inputs])
    except ValueError:
        shapes = " and ".join(str(x.shape) for x in inputs)
        raise ShapeError(f"shapes {shapes} cannot be broadcast together") from None


_broadcast = lru_cache(1024)(np.broadcast_shapes)


class SeveralDTypes(DTypeError):
    """Operands are not of the dtype that numpy converts them to: an op converts them and is applied again.

    Attributes:
        operands: those that are to be of one dtype.
        dtype: which one.
    """

    def __init__(self, operands: Sequence[Tensor], dtype: np.dtype[Any]) -> None:
        super().__init__(f"operands of {' and '.join(str(x.dtype) for x in operands)} must be converted to {dtype}")
        self.operands, self.dtype = operands, dtype

    def converted(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return an op's inputs, with the operands among them converted."""
        meant = set(map(id, self.operands))
        return tuple([as_dtype_of(x, self.dtype) if id(x) in meant else x for x in inputs])


def as_dtype_of(x: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """Return an operand in the dtype that it has beside others; a number stays a number that is known."""
    if x.dtype == dtype:
        return x
    if x.__class__ is Literal:
        return Literal(np.asarray(x.data, dtype))
    return TABLE["astype"].apply((x,), {"dtype": dtype})


def in_one_dtype(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the operands of a function in the one dtype that `common_dtype` finds for them.

    Raises:
        DTypeError: there is none.
    """
    try:
        common_dtype(inputs)
    except SeveralDTypes as error:
        return error.converted(inputs)
    return tuple(inputs)


def as_floats(*operands: Operand) -> tuple[Tensor, ...]:
    """Return the operands of a function of floats as tensors of one dtype; integers and truth values alone as float64.

    Raises:
        DTypeError: there is none, or it is not float32 or float64.
    """
    tensors = in_one_dtype(as_tensors(operands))
    if tensors[0].dtype.kind in "iub":
        return tuple([as_dtype_of(x, np.dtype(np.float64)) for x in tensors])
    float_only(tensors[0].dtype)
    return tensors


def in_float64(x: Operand) -> Tensor:
    """Return an operand of a function that computes in float64, converted by itself.

    Beside a float32 tensor a Python number would be rounded to float32 first.

    Raises:
        DTypeError: it holds floats that are neither float32 nor float64.
    """
    x = as_tensor(x)
    if x.dtype.kind == "f":
        float_only(x.dtype)
    return as_dtype_of(x, np.dtype(np.float64))


def as_reals(*operands: Operand) -> tuple[Tensor, ...]:
    """Return the operands of an elementwise function of floats as tensors of one dtype, as `infer_real` has it."""
    tensors = in_one_dtype(as_tensors(operands))
    try:
        infer_real(tensors[0])
    except SeveralDTypes as error:
        return tuple([as_dtype_of(x, error.dtype) for x in tensors])
    return tensors


def common_dtype(inputs: Sequence[Tensor]) -> Any:
    """Return the one dtype of all inputs.

    Raises:
        SeveralDTypes: they differ, and numpy converts them to a float dtype that is among them, as integers beside
            float64, or to one of whole numbers.
        DTypeError: they differ otherwise: floats keep their dtype, so the caller decides which one is meant.
    """
    dtype = inputs[0].dtype
    for x in inputs:
        if x.dtype != dtype:
            raise _several(inputs)
    return dtype


def _several(inputs: Sequence[Tensor]) -> DTypeError:
    dtypes = {x.dtype for x in inputs}
    kinds = {dtype.kind for dtype in dtypes}
    if "c" in kinds:
        return DTypeError(COMPLEX)
    if not kinds <= set("fiub"):
        return DTypeError("expected numbers and arrays of numbers only, got something else among the operands")
    floats = {dtype for dtype in dtypes if dtype.kind == "f"}
    dtype = np.result_type(*dtypes)
    if floats == {dtype} or (not floats and dtype.kind in "iu"):
        return SeveralDTypes(inputs, dtype)
    names = " and ".join(str(x.dtype) for x in inputs)
    return DTypeError(f"operands of {names} cannot be mixed; convert one with astype()")


def float_only(dtype: Any) -> Any:
    """Return the dtype if it is float32 or float64, else raise `DTypeError`."""
    if dtype not in FLOATS:
        raise DTypeError(f"expected float32 or float64, got {dtype}; convert with astype()")
    return dtype


def infer_same(x: Tensor, **attrs: Any) -> tuple[Shape, Any]:
    """Shape and dtype of an op whose result has those of its input."""
    return x.shape, x.dtype


def infer_elementwise(*inputs: Tensor, **attrs: Any) -> tuple[Shape, Any]:
    """Shape and dtype of an elementwise op."""
    shape, dtype = inputs[0].shape, inputs[0].dtype
    for x in inputs:
        if x.dtype is not dtype or x.shape != shape:
            return broadcast(inputs), common_dtype(inputs)
    return shape, dtype


def infer_float(*inputs: Tensor, **attrs: Any) -> tuple[Shape, Any]:
    """Shape and dtype of an elementwise op that is defined for floats only."""
    shape, dtype = infer_elementwise(*inputs)
    return shape, float_only(dtype)


def infer_real(*inputs: Tensor, **attrs: Any) -> tuple[Shape, Any]:
    """Shape and dtype of an elementwise op of floats which numpy has for whole numbers too, converted to float64."""
    shape, dtype = infer_elementwise(*inputs)
    if dtype.kind in "iu" and dtype.itemsize >= 4:
        raise SeveralDTypes(inputs, np.dtype(np.float64))
    return shape, float_only(dtype)


def infer_number(*inputs: Tensor, **attrs: Any) -> tuple[Shape, Any]:
    """Shape and dtype of an elementwise op that is defined for all numbers, and not for truth values."""
    shape, dtype = infer_elementwise(*inputs)
    if dtype == np.bool_:
        raise DTypeError("expected numbers, got truth values; convert with astype(), or use the logical functions")
    return shape, dtype


def elementwise(
    name: str,
    kernel: Callable[..., Any] | None,
    *partials: Callable[..., Partial] | None,
    doc: str,
    numpy: Any = None,
    bind: Callable[..., Sequence[Call]] | None = None,
    infer: Infer = infer_real,
    commutes: bool = False,
    scalar: str | Callable[[Equation], str] | None = None,
    simplify: Simplify | None = None,
    jvp: Callable[..., Tensor | None] | None = None,
    in_table: bool = True,
) -> Op:
    """Make and register an elementwise op from its kernel and its partial derivatives.

    Args:
        name: the op's name.
        kernel: a ufunc, or any function with its signature `kernel(*inputs, out)`.
        partials: for each input, `partial(y, *inputs)`: dy/dinput, written in ops or a number (see `scaled`);
            None for an input that counts as a constant. An op with None for all inputs is constant.
        doc: one line for the op reference.
        numpy: the numpy function it stands in for; None takes `kernel` when that is a ufunc.
        bind: instead of `kernel`, see `Op`.
        infer, commutes, scalar, simplify: see `Op`.
        jvp: the forward-mode rule where it is another than the sum of the partials times the tangents.
        in_table: whether it is registered.
    """

    def rule(derivative: Callable[..., Partial] | None) -> Rule:
        if derivative is None:
            return no_gradient

        def vjp(g: Tensor, y: Tensor, *inputs: Tensor) -> Tensor:
            return scaled(g, derivative(y, *inputs))

        return vjp

    def total(tangents: Tangents, y: Tensor, *inputs: Tensor) -> Tensor | None:
        found = None
        for tangent, derivative in zip(tangents, partials, strict=True):
            if tangent is not None and derivative is not None:
                term = scaled(tangent, derivative(y, *inputs))
                found = term if found is None else found + term
        return found

    constant = bool(partials) and not any(partials)
    op = Op(
        name=name,
        infer=infer,
        kernel=kernel,
        bind=bind,
        vjp=tuple(rule(derivative) for derivative in partials) if any(partials) else None,
        jvp=(jvp or total) if any(partials) else None,
        constant=constant,
        overwrites=tuple(range(max(1, len(partials)))),
        elementwise=True,
        commutes=commutes,
        scalar=scalar,
        simplify=simplify,
        doc=doc,
    )
    if not in_table:
        return op
    stands_in_for = numpy if numpy is not None else kernel if isinstance(kernel, np.ufunc) else None
    return register(op, *([] if stands_in_for is None else [stands_in_for]))


def scaled(g: Tensor, derivative: Partial) -> Tensor:
    """Return `g` times a derivative, which may be the number zero, one or minus one.

    Truth values as a derivative, or a pair of these and a factor, select: where they are false the product is 0, even
    if `g` is infinite or NaN.
    """
    if derivative.__class__ is tuple:
        condition, factor = derivative
        return TABLE["where"].apply((condition, g * factor, ZEROS[g.dtype]), NO_ATTRS)
    if isinstance(derivative, Tensor):
        if derivative.dtype.kind == "b":
            return TABLE["where"].apply((derivative, g, ZEROS[g.dtype]), NO_ATTRS)
        if g.__class__ is Literal and g.shape == derivative.shape and g.item() == 1:
            return derivative  # where a gradient begins
        return TABLE["mul"].apply((g, derivative), NO_ATTRS)
    if derivative == 0:
        zero = ZEROS[g.dtype]
        return TABLE["broadcast_to"].apply((zero,), {"shape": g.shape}) if g.shape else zero
    return g if derivative == 1 else -g if derivative == -1 else g * derivative


def total(terms: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of the terms, from the first to the last; None if there are none."""
    return reduce(add, terms) if terms else None


def linear_jvp(op_name: str) -> Callable[..., Tensor]:
    """Return the jvp of an op that is linear in all its inputs together: the op itself, on the tangents."""

    def jvp(tangents: Tangents, y: Tensor, *inputs: Tensor, **attrs: Any) -> Tensor:
        whole = [Tensor(np.zeros(x.shape, x.dtype)) if t is None else t for t, x in zip(tangents, inputs, strict=True)]
        return TABLE[op_name].apply(tuple(whole), attrs)

    return jvp


def multilinear_jvp(op_name: str) -> Callable[..., Tensor | None]:
    """Return the jvp of an op that is linear in each input: the sum over the inputs with a tangent."""

    def jvp(tangents: Tangents, y: Tensor, *inputs: Tensor, **attrs: Any) -> Tensor | None:
        op, known = TABLE[op_name], [(i, t) for i, t in enumerate(tangents) if t is not None]
        return total([op.apply((*inputs[:i], t, *inputs[i + 1 :]), attrs) for i, t in known])

    return jvp
