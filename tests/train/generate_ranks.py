"""A rank of ``test_generate_tp.test_two_gpus``: checks tokens of all models, then rank 1 kills itself at a token.

Rank 0 prints which ranks the error names.
"""

import json
import os
import signal
import sys

import numpy as np

import kos
from kos.errors import RankLost
from kos.train.generate import Decoder, generate
from kos.train.ops.cuda import CudaOps
from kos.train.parallel.mesh import Axis
from tests.train import generate_cases as cases
from tests.train.generation import GREEDY, PROMPTS, decoder, random_weights, tokens_of
from tests.train.test_generate_tp import SPLIT


def main(backend: str) -> None:
    comm = kos.init(backend, timeout=20)
    assert comm.device is not None
    ops, axis = CudaOps(comm.device), Axis(comm.rank, comm.size, comm)

    def source_of(name: str) -> Decoder:
        config = SPLIT[name]
        part = cases.part_of(random_weights(config), config, axis)
        weights = cases.weights_on(ops, part, config, np.dtype(np.float32), axis)
        return Decoder(config, ops, weights, len(PROMPTS), config.max_position_embeddings, axis)

    for name, config in SPLIT.items():
        expected = tokens_of(decoder(config, random_weights(config), 4), config, PROMPTS, 60, GREEDY)
        assert tokens_of(source_of(name), config, PROMPTS, 60, GREEDY, tp=axis) == expected, name
    try:
        for number, _ in enumerate(generate(source_of("llama"), 48, PROMPTS[:1], 40, GREEDY, tp=axis)):
            if comm.rank == 1 and number == 9:
                os.kill(os.getpid(), signal.SIGKILL)
    except RankLost as error:
        print(json.dumps(error.ranks), flush=True)
        comm.abort()


if __name__ == "__main__":
    main(sys.argv[1])
