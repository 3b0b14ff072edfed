"""Train a small GPT on text that keeps changing, with FSDP2 and AdaUPGD, on several processes.

The text is generated: sentences of a small grammar, in an alphabet that is permuted anew in every task. Parameters,
gradients and the state of the optimizer are sharded over the processes, and any number of processes can load a checkpoint::

    python examples/fsdp_gpt.py                                      # two processes on this machine
    python examples/fsdp_gpt.py --checkpoint gpt --state-dtype uint8 # resumes from the folder, if it is there
    torchrun --nproc-per-node 4 examples/fsdp_gpt.py                 # torchrun starts the processes
"""

import argparse
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import upgd

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
NOUNS = ["river", "stone", "teacher", "window", "garden", "engine", "letter", "mountain", "bird", "island"]
VERBS = ["follows", "paints", "remembers", "carries", "answers", "measures", "hides", "repairs"]
ADJECTIVES = ["old", "quiet", "green", "distant", "clever", "heavy", "narrow", "bright"]
CONTEXT = 64


def text(seed: int, length: int) -> str:
    """Sentences about nouns that do something to other nouns."""
    draw = random.Random(seed)
    found = ""
    while len(found) < length:
        words = (draw.choice(ADJECTIVES), draw.choice(NOUNS), draw.choice(VERBS), draw.choice(NOUNS))
        found += "the {} {} {} the {}. ".format(*words)
    return found[:length]


def batch(task: int, step: int, rank: int, size: int) -> Tensor:
    """Sequences of this process at a step, as numbers of letters; every task has its own alphabet."""
    order = list(range(len(LETTERS)))
    random.Random(task).shuffle(order)
    sequences = [text(seed=(step * 10_000 + rank) * 100 + i, length=CONTEXT + 1) for i in range(size)]
    return torch.tensor([[order[LETTERS.index(letter)] for letter in sequence] for sequence in sequences])


class Block(nn.Module):
    """Self-attention and a perceptron, each behind a LayerNorm and beside a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        split = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next letter at every position; returns the mean loss."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, sequences: Tensor) -> Tensor:
        known, next_letters = sequences[:, :-1], sequences[:, 1:]
        x = self.letters(known) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), next_letters.flatten())


def train(options: argparse.Namespace) -> Iterator[tuple[int, float]]:
    """Train in this process, one of a process group; yields the number of every step and the loss over all processes."""
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)  # the same initial weights in all processes
    model = GPT().to(device)
    mesh = init_device_mesh(device, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # After fully_shard, which replaces the parameters. Most gates are near ½, so lr is twice that of AdamW.
    optimizer = upgd.AdaUPGD(
        model.parameters(), lr=options.lr, sigma=options.sigma, seed=0, state_dtype=getattr(torch, options.state_dtype)
    )

    step = 0
    if options.checkpoint is not None and (options.checkpoint / ".metadata").exists():
        step = load(options.checkpoint, model, optimizer)
    while step < options.steps:
        loss = model(batch(step // options.task_length, step, rank, options.batch).to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if options.checkpoint is not None and (step % options.save_every == 0 or step == options.steps):
            save(options.checkpoint, model, optimizer, step)
        total = loss.detach()
        torch.distributed.all_reduce(total)
        yield step, total.item() / world


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, of any number of processes; returns the number of steps that it has."""
    weights, state = get_state_dict(model, optimizer)
    parts = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    return parts["step"]


def run(rank: int, world: int, port: int, options: argparse.Namespace) -> None:
    """Join the process group, train, and let the first process report."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))
    on_gpus = torch.cuda.device_count() >= world
    if on_gpus:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl" if on_gpus else "gloo", rank=rank, world_size=world)
    losses: list[float] = []
    for step, loss in train(options):
        losses.append(loss)
        if rank == 0 and (step % options.task_length == 0 or step == options.steps):
            tenth = max(1, len(losses) // 10)
            first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
            print(f"step {step}: loss {first:.3f} at the beginning of the task, {last:.3f} at its end", flush=True)
        if step % options.task_length == 0:
            losses = []
    torch.distributed.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--processes", type=int, default=2, help="how many to start, unless torchrun does; default 2")
    made.add_argument("--steps", type=int, default=300, help="default 300")
    made.add_argument("--task-length", type=int, default=100, help="steps until the alphabet changes; default 100")
    made.add_argument("--batch", type=int, default=8, help="sequences of each process at a step; default 8")
    made.add_argument("--lr", type=float, default=4e-3, help="learning rate; default 0.004")
    made.add_argument("--sigma", type=float, default=1e-2, help="standard deviation of the noise; default 0.01")
    made.add_argument(
        "--state-dtype",
        choices=("float32", "bfloat16", "uint8"),
        default="float32",
        help="bits of the optimizer's state",
    )
    made.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="save here, and resume if there is a checkpoint"
    )
    made.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="default 100")
    return made


def main() -> None:
    options = parser().parse_args()
    if "RANK" in os.environ:  # started by torchrun
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0, options)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run, (options.processes, port, options), nprocs=options.processes)


if __name__ == "__main__":
    main()
