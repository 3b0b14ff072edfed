"""What numba needs to be told so that its loops become the machine's widest vector instructions, and compile fast.

Four things stand in the way otherwise: numba computes with 32-bit integers in 64 bits; it cannot look at a float's bits;
LLVM prefers vectors of 256 bits on processors that have 512; and views of arrays cost time, both to compile and to make.
So the kernels compute with words, and read and write through pointers, as one would in C: ``p[j]``, and :func:`skip`
for what lies behind. Whoever calls them keeps the arrays alive. Every loop that matters is vectorised; ``inspect_asm()``
of a compiled function shows it.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

__all__ = [
    "BytePointer",
    "Bytes",
    "Doubles",
    "Floats",
    "Integers",
    "Pointer",
    "add",
    "apart",
    "bits_of",
    "both",
    "compiled",
    "compiled_sum",
    "digest_of_sources",
    "either",
    "float_of",
    "floats_at",
    "fused",
    "inlined",
    "kept_on_disk",
    "larger",
    "minus",
    "number",
    "shifted_down",
    "shifted_left",
    "shifted_right",
    "skip",
    "smaller",
    "start_of",
    "times",
    "truncated",
    "vectorised",
    "xor",
]

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
#: A place in an array, for numba; for a reader and a type checker, an array that begins there.
Pointer = NDArray[np.float32]
BytePointer = NDArray[np.uint8]

#: What numba says about the types of its decorators changes from version to version.
_njit: Any = numba.njit
_pointer_to: Any = types.CPointer

Function = TypeVar("Function", bound=Callable[..., Any])

#: Only long sums may be reordered, in :func:`compiled_sum`. Elsewhere every rounding is as written (:func:`fused` says where
#: a product is not rounded): LLVM compiles a loop several times, for cases that it tells apart, and all have to agree.
_REORDER = {"contract", "reassoc", "nsz"}
#: Functions that only other compiled functions call need no way in for Python and C, which would take time to compile.
_INTERNAL = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: Function) -> Function:
    """A function in machine code, to be called by others of its kind."""
    fast: Function = _njit(error_model="numpy", nogil=True, **_INTERNAL)(function)
    return fast


def compiled_sum(function: Function) -> Function:
    """A compiled function that may add its numbers in any order, but always the same one."""
    fast: Function = _njit(fastmath=_REORDER, error_model="numpy", nogil=True, **_INTERNAL)(function)
    return fast


def kept_on_disk(sources: int) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function for Python to call, without the GIL, and keeps it in numba's cache if there
    is a folder to write to.

    Args:
        sources: the digest of the sources that it is compiled from, see :func:`digest_of_sources`. It becomes part of the
            name that numba keeps the function under: numba itself looks only at the file of the function, not at those of
            the functions that it calls, and unpickles what an earlier version left under the same name, which fails if a
            class has been renamed since.
    """

    def decorate(function: Function) -> Function:
        function.__qualname__ += f".{sources:x}"
        try:
            fast: Function = _njit(cache=True, nogil=True)(function)
        except RuntimeError:  # numba found no such folder
            fast = _njit(nogil=True)(function)
        return fast

    return decorate


def digest_of_sources(*folders: Path) -> int:
    """Return a number that changes with any of the sources in this folder and in the given ones."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, *folders):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:8], "little")


def inlined(function: Function) -> Function:
    """A function that becomes part of the loop that calls it."""
    fast: Function = _njit(error_model="numpy", inline="always")(function)
    return fast


def _intrinsic(function: Callable[..., Any]) -> Any:
    """Let compiled functions call what ``function`` makes of LLVM's instructions."""
    return intrinsic(function)


@_intrinsic
def start_of(_context: Any, array: Any) -> Any:
    """A pointer to the first number of an array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return _pointer_to(array.dtype)(array), code


@_intrinsic
def floats_at(_context: Any, address: Any) -> Any:
    """A pointer to the floats at an address."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.PointerType(ir.FloatType()))

    return _pointer_to(types.float32)(types.int64), code


@_intrinsic
def skip(_context: Any, pointer: Any, count: Any) -> Any:
    """A pointer to what lies ``count`` numbers further."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.gep(arguments[0], [arguments[1]])

    return pointer(pointer, types.intp), code


def _word_operation(name: str) -> Any:
    """The instruction ``name`` of LLVM on two 32-bit words."""

    def operation(_context: Any, a: Any, b: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments)

        return types.uint32(types.uint32, types.uint32), code

    return _intrinsic(operation)


add, minus, times = _word_operation("add"), _word_operation("sub"), _word_operation("mul")
xor, both, either = _word_operation("xor"), _word_operation("and_"), _word_operation("or_")
shifted_left, shifted_right = _word_operation("shl"), _word_operation("lshr")
shifted_down = _word_operation("ashr")  #: right, with the sign


@_intrinsic
def bits_of(_context: Any, x: Any) -> Any:
    """The bits of a float32 as a word."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), code


@_intrinsic
def float_of(_context: Any, x: Any) -> Any:
    """The float32 that has these bits."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), code


@_intrinsic
def number(_context: Any, x: Any) -> Any:
    """The float32 nearest to a word that is read as a signed integer."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.sitofp(arguments[0], ir.FloatType())

    return types.float32(types.uint32), code


def _call(builder: Any, name: str, arguments: Any, flags: tuple[str, ...] = ()) -> Any:
    """Call one of LLVM's functions of float32."""
    single = ir.FloatType()
    function = builder.module.declare_intrinsic(name, [single], ir.FunctionType(single, [single] * len(arguments)))
    return builder.call(function, arguments, fastmath=flags)


@_intrinsic
def fused(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a·b + c``, rounded once if the processor can."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.fmuladd", arguments)

    return types.float32(types.float32, types.float32, types.float32), code


def _extremum(name: str) -> Any:
    """LLVM's maximum or minimum of two floats. Only this form, told that there is no nan, becomes a vector reduction."""

    def operation(_context: Any, a: Any, b: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return _call(builder, name, arguments, ("nnan", "nsz"))

        return types.float32(types.float32, types.float32), code

    return _intrinsic(operation)


larger, smaller = _extremum("llvm.maximum"), _extremum("llvm.minimum")


@_intrinsic
def truncated(_context: Any, x: Any) -> Any:
    """A float32 as a word, without its fraction."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fptosi(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), code


@_intrinsic
def vectorised(_context: Any) -> Any:
    """To be called first in a function whose loops shall become vector instructions.

    Promises LLVM that what the function writes through one pointer it does not reach through another. Otherwise it would
    look at the addresses on every call and might take a slower way that rounds differently. And asks for vectors of 512
    bits where the processor has them, which make noise 1.8 times faster.
    """

    def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        for argument in builder.function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        # llvmlite checks names against a list that lacks this one; a set's own method takes any.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), code


@_intrinsic
def apart(_context: Any) -> Any:
    """To be called first in a function that stays one of its own, and so rounds alike wherever it is called."""

    def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), code
