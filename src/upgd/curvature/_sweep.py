"""The sweep that propagates curvature during the ordinary backward pass.

A :class:`Follower` is the forward hook of one module. Each time the module is called with gradients enabled, the follower
creates a :class:`Call`, attaches it to the autograd node that the module created, and marks that node. A later module that
finds the mark on the node of its input knows which call produced the input. The calls form a chain (a graph, with Fork and
Add) parallel to autograd's graph, with the same lifetime.

In the backward pass, autograd runs a node and then its hooks. The hook reads the curvature of the call's output, which the
consumer of that output has stored there. The rule computes the curvature of the input from it and passes it to the
preceding call.

A broken chain would give wrong numbers, so every link is checked. If autograd reaches a call that has not received any
curvature, its output was used by an unknown operation. The gradient that arrives must also be *the same tensor object*
that the one known consumer sent: if anything else uses an output, autograd sums the gradients, and the sum is a new tensor.

Calls must not reference an output or the node that created it. Nodes hold their calls, so this would be a reference cycle
that Python's garbage collector cannot detect. Modules and nodes must not keep HesScale alive either, so followers hold weak
references to it.
"""

import weakref
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from upgd.curvature._backward import current_backward, graph_is_kept, sum_by_unit, transform_level
from upgd.curvature._hooks import Hook
from upgd.curvature._registry import Layer, LossRule

if TYPE_CHECKING:
    from upgd.curvature.hesscale import HesScale

#: A node of autograd's graph; torch.autograd.graph.Node has incorrect annotations.
Node = Any

#: Operations that preserve all entries and their order. They are followed although no module performs them; so are casts.
_RESHAPES = {
    "ToCopyBackward0",
    *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0", "CloneBackward0"),
    *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
}
_sweeps = count()
_NOTHING = cast(Tensor, None)


class Call:
    """One call of one module, as passed to its rule.

    Attributes:
        input: the input of the module.
        captured: the result of the rule's ``capture``.
        needs_input: whether the curvature of the input is needed; if not, the rule may return None.
        name: the name of the module in error messages.
    """

    __slots__ = (
        "backward",
        "captured",
        "curvatures",
        "follower",
        "gradients",
        "input",
        "name",
        "needs_input",
        "output",
        "shape",
        "sources",
        "sweep",
        "target",
        "version",
    )

    def __init__(self, follower: "Follower", outputs: int = 1, shape: torch.Size | None = None) -> None:
        self.follower = follower
        self.name = follower.name
        self.shape = shape
        self.needs_input = False
        self.input = _NOTHING
        self.version = 0
        self.target: Any = None
        self.captured: Any = None
        self.output: Tensor | None = None
        # The origin of each input: the call, the index of its output, and the index of the gradient of this call's node
        # (None if the module created several nodes and another one has it).
        self.sources: list[tuple[Call, int, int | None]] = []
        # For each output: its curvature and gradient, and the backward pass and loss that they belong to.
        self.curvatures: list[Tensor | None] = [None] * outputs
        self.gradients: list[Tensor | None] = [None] * outputs
        self.backward = self.sweep = -1

    def wants(self, param: Tensor | None) -> bool:
        """Return whether the diagonal of this parameter is needed; False if it is frozen or None."""
        return param is not None and param.requires_grad

    def add(self, param: Tensor | None, diagonal: Tensor | None) -> None:
        """Add to the parameter's diagonal: ``∂²L/∂param²`` summed over the batch and all positions."""
        if param is not None and diagonal is not None and param.requires_grad:
            self.follower.owner._add(param, diagonal, [param])

    # ------------------------------------------------------------------------------------------------- forward: linking

    def link(self, node: Node, inputs: Sequence[Any]) -> None:
        """Find the calls that produced the inputs, mark the node, and register this call as its hook."""
        owner = self.follower.owner
        for x in inputs:
            before = x.grad_fn if isinstance(x, Tensor) else None
            if before is None:
                continue
            source = signed_by(before, owner)
            if source is None:
                self.follower.stranger = before.name()
            else:
                self._link(source, x.output_nr, *self._entry(node, x, inputs), node)
        node.metadata[owner._reshapes] = self
        node.register_hook(self._on_backward)

    def _entry(self, node: Node, x: Tensor, inputs: Sequence[Any]) -> tuple[Node, int]:
        """Return the only edge that leads from the module's part of the graph, starting at ``node``, to its input."""
        edges = _edges(node, x, inputs)
        # Modules of torch have one such edge. With several edges, each of them would carry only part of the gradient.
        entries = list(islice(edges, 1)) if self.follower.is_of_torch else list(edges)
        if len(entries) != 1:
            raise RuntimeError(
                f"HesScale cannot follow {self.name}: its forward uses its input in {len(entries)} places; start it with "
                "x = x.view_as(x), so that there is only one"
            )
        return entries[0]

    def _link(self, source: "Call", output: int, entry: Node, position: int, node: Node) -> None:
        self.needs_input = True
        if entry is node:
            self.sources.append((source, output, position))
            return
        self.sources.append((source, output, None))
        gradients = source.gradients

        def remember(grad_inputs: Sequence[Tensor | None], _: Any) -> None:
            gradients[output] = grad_inputs[position]

        entry.register_hook(remember)

    # ------------------------------------------------------------------------------------------------ backward: sweeping

    def _on_backward(self, grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
        owner = self.follower.owner_if_alive()  # keeps the owner alive during the sweep
        if owner is None:
            return
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self._sweep(grad_inputs, grad_outputs)
        else:
            self._sweep(grad_inputs, grad_outputs)

    def _sweep(self, grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
        curvature = self.follower.curvature_of_input(self, grad_outputs)
        for source, output, position in self.sources:
            assert curvature is not None
            if position is not None:
                gradient = source.gradients[output] = grad_inputs[position]
                if gradient is not None and gradient.device != curvature.device:  # after x.to(device)
                    curvature = curvature.to(gradient.device)
            source.receive(output, curvature, self.backward, self.sweep)
        if not graph_is_kept():
            self.input = _NOTHING
            self.target = self.captured = self.output = None

    def receive(self, output: int, curvature: Tensor, backward: int, sweep: int) -> None:
        """Store the curvature of an output, received from the call that used it."""
        if self.curvatures[output] is not None and self.backward == backward:
            raise RuntimeError(
                f"HesScale found two modules that use the output of {self.name}; give each its own copy: "
                "a, b = upgd.curvature.Fork()(output)"
            )
        if self.shape is not None and curvature.shape != self.shape:
            curvature = curvature.reshape(self.shape)
        self.curvatures[output] = curvature
        self.backward, self.sweep = backward, sweep

    def take(self, grad_outputs: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return the curvature and the gradient of the output; with several outputs, which are copies, their sums."""
        if len(grad_outputs) == 1:
            self._check(0, grad_outputs[0])
            h, g = self.curvatures[0], grad_outputs[0]
            self.curvatures[0] = self.gradients[0] = None
            return h, g  # type: ignore[return-value]  # checked
        curvatures, gradients = [], []
        for output, grad in enumerate(grad_outputs):
            if grad is not None:
                self._check(output, grad)
                gradients.append(grad)
                curvatures.append(cast(Tensor, self.curvatures[output]))
                self.curvatures[output] = self.gradients[output] = None
        return torch.stack(curvatures).sum(0), torch.stack(gradients).sum(0)

    def _check(self, output: int, grad: Tensor | None) -> None:
        if self.curvatures[output] is None or self.backward != current_backward():
            raise RuntimeError(self.follower.owner._lost(self.name))
        if grad is not self.gradients[output]:
            raise RuntimeError(
                f"HesScale followed one use of the output of {self.name}, but its gradient has another part: the output is "
                "also used elsewhere (a functional call, a penalty, a second module), or a tensor hook changed the "
                "gradient. Share an output between modules with a, b = upgd.curvature.Fork()(output), add with "
                "upgd.curvature.Add, or exclude the other use with output.detach()."
            )

    def upstream_parameters(self) -> list[Tensor]:
        """Return the trainable parameters of the nearest preceding layer that has any; their gradients come later."""
        calls = [source for source, _, _ in self.sources]
        for call in calls:
            trainable: list[Tensor] = [param for param in call.follower.params if param.requires_grad]
            if trainable:
                return trainable
            calls.extend(source for source, _, _ in call.sources)
        return []

    def unit_dim(self) -> int | None:
        """Return the output dimension that holds the units or channels of the last layer that defines any."""
        call: Call | None = self
        while call is not None:
            dim = call.follower.layer.unit_dim
            if dim is not None:
                here, there = cast(torch.Size, self.shape), cast(torch.Size, call.shape)
                if len(here) == len(there):
                    return dim
                # Flattened. If only the positions were, the channels keep their place from the front; otherwise, all
                # entries are units.
                place = len(there) + dim
                return place if here[place : place + 1] == there[place : place + 1] else -1
            call = call.sources[0][0] if call.sources else None
        return None


class Follower:
    """The forward hook of one layer."""

    def __init__(self, owner: "HesScale", module: nn.Module, name: str, layer: Layer) -> None:
        self.owner_if_alive = weakref.ref(owner)
        self.module = module
        self.name = name
        self.layer = layer
        self.params = list(module.parameters(recurse=False))
        self.is_of_torch = type(module).__module__.startswith("torch.nn.")
        self.watched = False
        self.stranger: str | None = None  # the last unknown operation whose result was passed to the module
        self.last = (-1, -1)  # the last backward pass and sweep

    @property
    def owner(self) -> "HesScale":
        """The owner; use only in its own methods or during a call, while a strong reference exists."""
        owner = self.owner_if_alive()
        assert owner is not None
        return owner

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        owner = self.owner_if_alive()
        if owner is None or not first.requires_grad or owner.is_paused or transform_level() is not None:
            return None
        if not args:
            raise TypeError(f"HesScale needs {self.name} to be called with its input as a positional argument")
        if first is args[0]:
            if getattr(module, "inplace", False):
                raise ValueError(in_place(self.name))
            if not self.watched or first.grad_fn is None:
                return None  # the module is an identity
            first = output = first.view_as(first)
        call = Call(self, len(output) if isinstance(output, tuple) else 1, first.shape)
        call.input = args[0]
        call.version = args[0]._version
        if self.layer.capture is not None:
            call.captured = self.layer.capture(module, args[0], first)
        if self.watched:
            call.output = first.detach()
        call.link(first.grad_fn, args)
        self.stranger = None if call.needs_input else self.stranger
        return output

    def curvature_of_input(self, call: Call, grad_outputs: Sequence[Tensor | None]) -> Tensor | None:
        h, g = call.take(grad_outputs)
        if call.input._version != call.version:
            raise RuntimeError(
                f"the input of {self.name} was changed in place after the forward pass; HesScale needs the original"
            )
        if self.params:
            self._once(call)
            self.owner._drop_old(self.params, call.backward)
        # Mixed precision: the parameters determine the type; without any, the curvature received so far.
        dtype = self.params[0].dtype if self.params else h.dtype
        if h.dtype != dtype:
            h = h.to(dtype)
        if g.dtype != dtype:
            g = g.to(dtype)
        if call.input.dtype != dtype and call.input.is_floating_point():  # embedding indices stay integers
            call.input = call.input.to(dtype)
        if self.watched:
            self._add_features(call, h)
        return self.layer.rule(self.module, call, h, g)

    def _once(self, call: Call) -> None:
        if self.last == (call.backward, call.sweep):
            raise RuntimeError(
                f"HesScale found that {self.name} is called twice for one loss; its parameters then have mixed second "
                "derivatives, which HesScale does not compute. Call each layer once."
            )
        self.last = call.backward, call.sweep

    def _add_features(self, call: Call, h: Tensor) -> None:
        assert call.output is not None
        dim = call.unit_dim()
        if dim is None:
            dim = -1 if h.ndim < 3 else 1
        worth = h * call.output.to(h.dtype).square()
        self.owner._add(self.module, sum_by_unit(worth, dim), call.upstream_parameters())

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is not followed, because its hooks have no owner.
        return Hook, ("",)


class ReshapeFollower(Follower):
    """Represents all reshapes and casts between modules. It has no module and no hook, and passes curvature unchanged."""

    def __init__(self, owner: "HesScale") -> None:
        super().__init__(owner, nn.Identity(), "a reshaped tensor", Layer(lambda module, call, h, g: h))

    def curvature_of_input(self, call: Call, grad_outputs: Sequence[Tensor | None]) -> Tensor:
        return call.take(grad_outputs)[0]


class LossFollower(Follower):
    """The forward hook of the criterion."""

    def __init__(self, owner: "HesScale", module: nn.Module, name: str, rule: LossRule) -> None:
        super().__init__(owner, module, name, Layer(lambda module, call, h, g: None))
        self.rule = rule

    def __call__(  # type: ignore[override]  # a hook with keyword arguments
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        owner = self.owner_if_alive()
        if owner is None or not output.requires_grad or owner.is_paused or transform_level() is not None:
            return
        y, target = (*args, *(kwargs[name] for name in ("input", "target") if name in kwargs))
        origin = target.grad_fn if isinstance(target, Tensor) else None
        # The squared error is symmetric; all other rules hold for the input only.
        if origin is not None and signed_by(origin, owner) is not None and not isinstance(module, nn.MSELoss):
            raise RuntimeError(
                f"HesScale knows the curvature of {self.name} with respect to its input only, but the model also computes "
                "its target; pass target.detach()"
            )
        call = Call(self)
        call.input, call.target, call.version = y, target, y._version
        call.link(output.grad_fn, (y, target))
        self.stranger = None if call.needs_input else self.stranger

    def curvature_of_input(self, call: Call, grad_outputs: Sequence[Tensor | None]) -> Tensor | None:
        if not call.needs_input:
            return None
        call.backward, call.sweep = current_backward(), next(_sweeps)
        factor, y = grad_outputs[0], call.input
        assert factor is not None
        if y.dtype in (torch.float16, torch.bfloat16):
            y, factor = y.float(), factor.float()
        return self.rule(self.module, y, call.target, factor)


def signed_by(node: Node, owner: "HesScale") -> Call | None:
    """Return the call of ``owner`` that produced this node's output, directly or through reshapes; otherwise None."""
    call: Call | None = node.metadata.get(owner._reshapes)
    if call is None and node.name() in _RESHAPES:
        before, output = node.next_functions[0]
        source = signed_by(before, owner) if before is not None else None
        if source is not None:
            call = Call(owner._reshapes)
            call.needs_input = True
            call.sources.append((source, output, 0))
            node.metadata[owner._reshapes] = call
            node.register_hook(call._on_backward)
    return call


def _edges(node: Node, x: Tensor, inputs: Sequence[Any]) -> Iterator[tuple[Node, int]]:
    """Yield all edges (node, index) that lead to ``x`` from the part of the graph between ``node`` and ``inputs``."""
    end, end_output = x.grad_fn, x.output_nr
    todo: list[Node] = [node]
    for current in todo:
        following = current.next_functions
        for position, (before, output) in enumerate(following):
            if before is end and output == end_output:
                yield current, position
        known = [None, *todo, *(y.grad_fn for y in inputs if isinstance(y, Tensor))]
        todo.extend(before for before, _ in following if before not in known)


def in_place(name: str) -> str:
    return f"HesScale needs the input of {name}, which inplace=True overwrites; build it with inplace=False."
