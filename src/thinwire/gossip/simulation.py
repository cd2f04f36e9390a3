"""Virtual workers: the mixers that run on the network, on any number of replicas in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.gossip import graphs, mixers
from thinwire.gossip.mixer import Mixer
from thinwire.gossip.node import Node, Replica, parameters_of


class GossipSimulation:
    """One gossip step over all replicas at a time, in lockstep; node i is `replicas[i]`.

    `bytes_sent` counts every payload that would have travelled, in the sum over nodes.
    """

    def __init__(
        self, replicas: Sequence[Replica], graph: graphs.GraphLike | graphs.Varying, mixer: str | Mixer, *,
        seed: int = 0, equal: bool = False,
    ):  # fmt: skip
        """`equal`: the replicas start with the same weights, so the first mix() has nothing to do."""
        self.mixer: Mixer = mixers.parse(mixer)
        self.graph: graphs.Schedule = graphs.Schedule(graph, nodes=len(replicas), mixer=self.mixer)
        self._parameters = [parameters_of(replica) for replica in replicas]
        self.nodes: list[Node] = [
            Node(parameters, number=number, mixer=self.mixer, seed=seed)
            for number, parameters in enumerate(self._parameters)
        ]
        self.bytes_sent: int = 0
        self.messages_sent: int = 0
        if equal:
            for node, parameters in zip(self.nodes, self._parameters, strict=True):
                node.start_equal(parameters)

    def mix(self) -> None:
        """Every replica moves towards its neighbours."""
        graph = self.graph.at(self.nodes[0].step)
        for node, parameters in zip(self.nodes, self._parameters, strict=True):
            node.load(parameters)
        conversations = [node.mixing(graph.neighbours(node.number)) for node in self.nodes]
        said = [next(conversation, None) for conversation in conversations]
        while any(messages is not None for messages in said):
            assert all(messages is not None for messages in said), "every node must yield equally often"
            heard: list[dict[int, Tensor]] = [{} for _ in self.nodes]
            for sender, messages in enumerate(said):
                for neighbour, payload in (messages or {}).items():
                    heard[neighbour][sender] = payload.clone()  # as a wire would: the sender may reuse its memory
                    self.bytes_sent += payload.numel()
                    self.messages_sent += 1
            said = [_answer(c, answers) for c, answers in zip(conversations, heard, strict=True)]
        for node, parameters in zip(self.nodes, self._parameters, strict=True):
            node.store(parameters)

    def mean(self) -> dict[str, Tensor]:
        """The mean of all replicas' weights."""
        return {name: torch.stack([p[name].detach() for p in self._parameters]).mean(0) for name in self._parameters[0]}

    def consensus(self) -> float:
        """The root mean square distance of the replicas to their mean."""
        mean = self.mean()
        squares = sum(
            float((p[name].detach().double() - mean[name].double()).square().sum())
            for p in self._parameters for name in mean
        )  # fmt: skip
        return (squares / len(self.nodes)) ** 0.5


def _answer(conversation, answers: dict[int, Tensor]) -> dict[int, Tensor] | None:
    try:
        return conversation.send(answers)
    except StopIteration:
        return None
