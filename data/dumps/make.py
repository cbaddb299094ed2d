"""Writes the samples of this folder, each by the tool's own writer: `python data/dumps/make.py [NAME ...]`.

The program is a two-layer network with a softmax, on two ranks where the tool knows ranks. `observed` has a fault:
the bias of the second layer is not added on rank 1 of tp, or a checkpoint has another weight there; without ranks, the
softmax is over the first dimension. Which version of each tool wrote what is here: README.md.
"""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
RANKS = 2


def weights():
    torch.manual_seed(0)
    return [torch.randn(*shape) for shape in ((6, 8), (8, 12), (12, 8), (8,))]


def network(x, w1, w2, b, over=-1):
    """The reference: h and a of shape [6, 12], y and p of [6, 8]."""
    h = x @ w1
    a = torch.nn.functional.silu(h)
    y = a @ w2 + b
    return {"h": h, "a": a, "y": y, "p": y.softmax(over)}


def steps(fault=False):
    return network(*weights(), over=0 if fault else -1)


def sharded(rank, fault):
    """What rank `rank` of tp holds: columns of w1 and rows of w2, whose products are added up over the ranks.

    The output is split again by its columns; of those rank 1 forgets the bias where there is a fault.
    """
    x, w1, w2, b = weights()
    columns = slice(0, 6), slice(6, 12)
    h = [x @ w1[:, own] for own in columns]
    a = [torch.nn.functional.silu(part) for part in h]
    partial = [part @ w2[own] for part, own in zip(a, columns, strict=True)]
    y = partial[0] + partial[1]  # as an all-reduce adds them up
    y = torch.cat([y[:, :4] + b[:4], y[:, 4:] + (0.0 if fault else b[4:])], 1)
    h, a, partial, shard, p = h[rank], a[rank], partial[rank], y[:, 4 * rank : 4 * rank + 4], y.softmax(-1)
    return {"x": (x, "t d"), "h": (h, "t f[tp]"), "a": (a, "t f[tp]"), "partial": (partial, "t d[tp:partial]"),
            "y": (shard, "t d[tp]"), "p": (p, "t d")}  # fmt: skip


def golden(folder):
    """A recorded golden, which the tools' dumps are compared with."""
    import whywrong

    x, w1, w2, b = weights()

    def reference(x, w1, w2, b):
        h = x @ w1
        a = torch.nn.functional.silu(h)
        partial = a @ w2
        y = partial + b
        return {"h": h, "a": a, "partial": partial, "y": y, "p": y.softmax(-1)}

    whywrong.golden(reference, x=x, w1=w1, w2=w2, b=b).save(folder / "golden.safetensors")


def sglang(folder):
    """By sglang/srt/debug_utils/dumper.py itself; stubs stand for the parts of sglang that need a GPU."""
    rank = 0

    def stub(name, **content):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)

    class Parallel:
        """Of every axis but tp there is one rank."""

        def __getattr__(self, name):
            tp = name.split("_")[0] == "tp"
            return (rank if tp else 0) if name.endswith("_rank") else RANKS if tp else 1

    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.layers", "sglang.srt.model_executor"):
        stub(name)
    stub("zmq", Socket=object)
    stub("sglang.srt.managers.io_struct", sock_recv=None, sock_send=None, wrap_as_pickle=None)
    context = dict.fromkeys(("get_server_args", "get_serving"))
    stub("sglang.srt.runtime_context", get_parallel=Parallel, **context)
    stub("sglang.srt.utils", get_device=None)
    stub("sglang.srt.distributed")
    attention = {"get_moe_cp_size": lambda: 1, "is_dp_attention_enabled": lambda: False}
    stub("sglang.srt.layers.dp_attention", **attention)
    sys.modules["sglang.srt.layers"].dp_attention = sys.modules["sglang.srt.layers.dp_attention"]
    sys.modules["sglang.srt"].distributed = sys.modules["sglang.srt.distributed"]
    stub("sglang.srt.layers.logits_processor", LogitsProcessorOutput=type("Logits", (), {}))
    batch = {"ForwardBatch": type("Batch", (), {}), "PPProxyTensors": type("Proxy", (), {})}
    stub("sglang.srt.model_executor.forward_batch_info", **batch)
    import dumper as module  # sglang/srt/debug_utils is in PYTHONPATH

    for side in ("golden", "observed"):
        for rank in range(RANKS):
            module._get_rank, module._get_world_size = (lambda: rank), (lambda: RANKS)  # noqa: B023
            settings = {"enable": True, "dir": str(folder), "exp_name": side, "enable_output_console": False}
            dumper = module._Dumper(config=module.DumperConfig(**settings))
            for name, (value, dims) in sharded(rank, side == "observed").items():
                dumper.dump(name, value, dims=dims, layer_id=0)


def msprobe(folder):
    """By msprobe.pytorch.PrecisionDebugger, on a CPU."""
    from msprobe.pytorch import PrecisionDebugger

    side = os.environ.get("SIDE", "golden")  # the debugger is one for each process
    config = {"task": "tensor", "dump_path": str(folder / side), "rank": [], "step": [], "level": "L1",
              "tensor": {"scope": [], "list": []}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    x, w1, w2, b = weights()
    model = torch.nn.Sequential(torch.nn.Linear(8, 12, bias=False), torch.nn.SiLU(), torch.nn.Linear(12, 8))
    with torch.no_grad():
        model[0].weight.copy_(w1.T)
        model[2].weight.copy_(w2.T)
        model[2].bias.copy_(b)
    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
    with torch.no_grad():
        debugger.start(model=model)
        model(x).softmax(0 if side == "observed" else -1)
        debugger.stop()
        debugger.step()
    (folder / "config.json").unlink()
    made = next((folder / side / "step0").glob("proc*"))  # and the process's id
    made = made.rename(made.parent / "proc0")
    (made / "stack.json").unlink()
    about = json.loads((made / "dump.json").read_text())
    about["dump_data_dir"] = "dump_tensor_data"  # it is absolute, and not read
    (made / "dump.json").write_text(json.dumps(about, indent=1))


def dcp(folder):
    """By torch.distributed.checkpoint.save; each of two processes writes its shard of the weights."""
    import torch.distributed as dist
    import torch.multiprocessing

    for side in ("golden", "observed"):
        torch.multiprocessing.spawn(_save_dcp, (folder / side, side == "observed"), RANKS)
    assert not dist.is_initialized()


def _save_dcp(rank, folder, fault):
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    _, w1, w2, b = weights()
    if fault:
        w1[:, 6:] *= 1.01  # the second shard
    state = {"w1": distribute_tensor(w1, mesh, [Shard(1)]), "w2": distribute_tensor(w2, mesh, [Shard(0)]), "b": b}
    os.chdir(folder.parent)  # the path is stored
    checkpoint.save({"model": state, "step": 3, "note": "text"}, checkpoint_id=folder.name)
    dist.destroy_process_group()


def megatron(folder):
    """As Megatron-LM's legacy save_checkpoint calls torch.save: a rank's state beside arguments and random states."""
    from argparse import Namespace

    _, w1, w2, b = weights()
    for side in ("golden", "observed"):
        for rank in range(RANKS):
            columns = slice(6 * rank, 6 * rank + 6)
            state = {"dense_h_to_4h.weight": w1.T[columns].clone(), "dense_4h_to_h.weight": w2.T[:, columns].clone(),
                     "dense_4h_to_h.bias": b + (0.01 if side == "observed" and rank == 1 else 0.0)}  # fmt: skip
            path = folder / side / "iter_0000010" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            arguments = Namespace(tensor_model_parallel_size=RANKS, micro_batch_size=1)
            content = {"args": arguments, "checkpoint_version": 3.0, "iteration": 10, "model": state}
            torch.save(content | {"rng_state": [{"np_rng_state": np.random.RandomState(0).get_state()}]}, path)
        (folder / side / "latest_checkpointed_iteration.txt").write_text("10")


def jax(folder):
    """By numpy.savez from bfloat16 arrays as JAX has them, of ml_dtypes; NumPy stores them without their type."""
    import ml_dtypes

    for side in ("golden", "observed"):
        narrow = {name: value.numpy().astype(ml_dtypes.bfloat16) for name, value in steps(side == "observed").items()}
        np.savez(folder / f"{side}.npz", **narrow)


def onnxruntime(folder):
    """As onnxruntime/core/framework/debug_node_inputs_outputs_utils.cc writes them, by onnx.save_tensor.

    ONNX Runtime itself writes them in a build with onnxruntime_DEBUG_NODE_INPUTS_OUTPUTS=1, which no package has.
    """
    import onnx
    from onnx import numpy_helper

    for side in ("golden", "observed"):
        (folder / side).mkdir(parents=True, exist_ok=True)
        for name, value in steps(side == "observed").items():
            onnx.save_tensor(
                numpy_helper.from_array(value.numpy(), f"/layer/{name}"), folder / side / f"_layer_{name}.tensorproto"
            )


def debug_mode(folder):
    """By torch.utils._debug_mode.DebugMode with log_tensor_hashes: text with a hash for each call, no tensors."""
    from torch.utils._debug_mode import DebugMode

    with DebugMode() as mode, DebugMode.log_tensor_hashes(hash_inputs=True):
        network(*weights())
    folder.mkdir(exist_ok=True)
    (folder / "golden.txt").write_text(mode.debug_string() + "\n")


MAKERS = (sglang, msprobe, dcp, megatron, jax, onnxruntime, debug_mode)

if __name__ == "__main__":
    golden(HERE)
    for maker in MAKERS:
        if maker.__name__ in sys.argv[1:]:
            (HERE / maker.__name__).mkdir(exist_ok=True)
            maker(HERE / maker.__name__)
