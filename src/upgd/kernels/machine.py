"""The interface to numba and LLVM that makes loops compile fast, to the widest vector instructions of the machine.

By default, numba computes with 32-bit integers in 64 bits and cannot access the bits of a float; LLVM prefers 256-bit vectors
on processors that support 512 bits; and array views are slow, both to compile and to create. The kernels therefore compute
with 32-bit words and access memory through pointers, as in C: ``p[j]``, and :func:`skip` for offsets. The caller keeps the
arrays alive. Every important loop is vectorized, as ``inspect_asm()`` of a compiled function shows.
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
    "entry_point",
    "float_of",
    "floats_at",
    "fused",
    "inlined",
    "integers_at",
    "kept_on_disk",
    "larger",
    "minus",
    "number",
    "result_of",
    "room_for",
    "shifted_down",
    "shifted_left",
    "shifted_right",
    "skip",
    "smaller",
    "start_of",
    "taken",
    "times",
    "truncated",
    "vectorised",
    "xor",
]

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
#: A pointer into an array, for numba; for readers and type checkers, an array that starts there.
Pointer = NDArray[np.float32]
BytePointer = NDArray[np.uint8]

#: numba's annotations of its decorators change between versions.
_njit: Any = numba.njit
_cfunc: Any = numba.cfunc
_pointer_to: Any = types.CPointer

Function = TypeVar("Function", bound=Callable[..., Any])

#: Only long sums may be reordered, in :func:`compiled_sum`. Elsewhere, rounding is exactly as written (:func:`fused` marks
#: products that are not rounded): LLVM compiles several versions of a loop for different cases, and all must agree.
_REORDER = {"contract", "reassoc", "nsz"}
#: Functions that are only called by compiled functions need no entry points for Python and C, which take time to compile.
_INTERNAL = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: Function) -> Function:
    """Compile a function to be called by other compiled functions."""
    fast: Function = _njit(error_model="numpy", nogil=True, **_INTERNAL)(function)
    return fast


def compiled_sum(function: Function) -> Function:
    """Compile a function that may add its numbers in any fixed order."""
    fast: Function = _njit(fastmath=_REORDER, error_model="numpy", nogil=True, **_INTERNAL)(function)
    return fast


def kept_on_disk(sources: int) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function for Python, which releases the GIL, and stores it in numba's cache if a
    folder is writable.

    Args:
        sources: the digest of the sources that it is compiled from, see :func:`digest_of_sources`. It becomes part of the
            function's name in numba's cache. numba checks only the file of the cached function, not those of the functions
            that it calls, and unpickles what an earlier version stored under the same name, which fails if a class has been
            renamed.
    """

    def decorate(function: Function) -> Function:
        function.__qualname__ += f".{sources:x}"
        try:
            fast: Function = _njit(cache=True, nogil=True)(function)
        except RuntimeError:  # numba found no writable folder
            fast = _njit(nogil=True)(function)
        return fast

    return decorate


def entry_point(sources: int) -> Callable[[Function], Any]:
    """Return a decorator that compiles a function of one pointer to integers, to be called from C by its ``address``, and
    stores it like :func:`kept_on_disk`.
    """
    signature = types.void(_pointer_to(types.int64))

    def decorate(function: Function) -> Any:
        function.__qualname__ += f".{sources:x}"
        try:
            return _cfunc(signature, cache=True)(function)
        except RuntimeError:  # numba found no writable folder
            return _cfunc(signature)(function)

    return decorate


def digest_of_sources(*folders: Path) -> int:
    """Return a number that changes with any source file in this folder and in the given ones."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, *folders):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:8], "little")


def inlined(function: Function) -> Function:
    """Compile a function that is inlined into the calling loop."""
    fast: Function = _njit(error_model="numpy", inline="always")(function)
    return fast


def _intrinsic(function: Callable[..., Any]) -> Any:
    """Make LLVM code generated by ``function`` callable from compiled functions."""
    return intrinsic(function)


@_intrinsic
def start_of(_context: Any, array: Any) -> Any:
    """Return a pointer to the first element of an array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return _pointer_to(array.dtype)(array), code


def _pointer_from_address(kind: Any, bits: Any) -> Any:
    """Return the conversion of an address to a pointer."""

    def operation(_context: Any, address: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], ir.PointerType(bits))

        return _pointer_to(kind)(types.int64), code

    return _intrinsic(operation)


floats_at = _pointer_from_address(types.float32, ir.FloatType())
integers_at = _pointer_from_address(types.int64, ir.IntType(64))


@_intrinsic
def taken(_context: Any, counter: Any) -> Any:
    """Increment a counter that threads share, and return its former value."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", arguments[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(_pointer_to(types.int64)), code


@_intrinsic
def result_of(_context: Any, function: Any) -> Any:
    """Call the C function at an address, which takes no arguments and returns an ``int``."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        result = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])
        return builder.sext(result, ir.IntType(64))

    return types.int64(types.int64), code


@_intrinsic
def skip(_context: Any, pointer: Any, count: Any) -> Any:
    """Return the pointer plus ``count`` elements."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.gep(arguments[0], [arguments[1]])

    return pointer(pointer, types.intp), code


def room_for(count: int) -> Any:
    """Return a function that returns a pointer to ``count`` floats on the stack, aligned to a cache line.

    They are the same ones in every call within a function, and end with it.
    """

    def operation(_context: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            with builder.goto_entry_block():
                floats = builder.alloca(ir.ArrayType(ir.FloatType(), count))
            floats.align = 64
            return builder.bitcast(floats, ir.PointerType(ir.FloatType()))

        return _pointer_to(types.float32)(), code

    return _intrinsic(operation)


def _word_operation(name: str) -> Any:
    """Return the LLVM instruction ``name`` on two 32-bit words."""

    def operation(_context: Any, a: Any, b: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return getattr(builder, name)(*arguments)

        return types.uint32(types.uint32, types.uint32), code

    return _intrinsic(operation)


add, minus, times = _word_operation("add"), _word_operation("sub"), _word_operation("mul")
xor, both, either = _word_operation("xor"), _word_operation("and_"), _word_operation("or_")
shifted_left, shifted_right = _word_operation("shl"), _word_operation("lshr")
shifted_down = _word_operation("ashr")  #: arithmetic right shift


@_intrinsic
def bits_of(_context: Any, x: Any) -> Any:
    """Return the bits of a float32 as a word."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), code


@_intrinsic
def float_of(_context: Any, x: Any) -> Any:
    """Return the float32 with these bits."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), code


@_intrinsic
def number(_context: Any, x: Any) -> Any:
    """Convert a word, read as a signed integer, to the nearest float32."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.sitofp(arguments[0], ir.FloatType())

    return types.float32(types.uint32), code


def _call(builder: Any, name: str, arguments: Any, flags: tuple[str, ...] = ()) -> Any:
    """Call an LLVM function of float32."""
    single = ir.FloatType()
    function = builder.module.declare_intrinsic(name, [single], ir.FunctionType(single, [single] * len(arguments)))
    return builder.call(function, arguments, fastmath=flags)


@_intrinsic
def fused(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a·b + c``, rounded once if the processor supports it."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.fmuladd", arguments)

    return types.float32(types.float32, types.float32, types.float32), code


def _extremum(name: str) -> Any:
    """Return LLVM's maximum or minimum of two floats. LLVM vectorizes a reduction only in this form, with the nnan flag."""

    def operation(_context: Any, a: Any, b: Any) -> Any:
        def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return _call(builder, name, arguments, ("nnan", "nsz"))

        return types.float32(types.float32, types.float32), code

    return _intrinsic(operation)


larger, smaller = _extremum("llvm.maximum"), _extremum("llvm.minimum")


@_intrinsic
def truncated(_context: Any, x: Any) -> Any:
    """Convert a float32 to a word, truncating its fraction."""

    def code(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fptosi(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), code


@_intrinsic
def vectorised(_context: Any) -> Any:
    """Enable vectorization; call this first in a function with loops to be vectorized.

    It promises LLVM that memory written through one pointer is not accessed through another. Otherwise, LLVM would compare
    the addresses on every call and might use a slower version with different rounding. It also requests 512-bit vectors where
    available, which make noise 1.8 times faster.
    """

    def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        for argument in builder.function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        # llvmlite checks names against a list that lacks this one, so bypass the check.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), code


@_intrinsic
def apart(_context: Any) -> Any:
    """Prevent inlining, so that a function rounds in the same way wherever it is called; call this first."""

    def code(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), code
