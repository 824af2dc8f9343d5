"""Six questions that people ask before they rent a GPU, put to the planner from Python."""

from __future__ import annotations

import naught
from naught.machine import GPUS
from naught.papers import TABLES
from naught.quantity import show_bytes, show_count
from naught.text import table


def main() -> None:
    papers_table()
    one_small_gpu()
    one_h200()
    a_cluster()
    your_own_module()
    your_configuration()


def ask(question: str) -> None:
    print(f"\n{question}\n{'=' * len(question)}\n")


def papers_table() -> None:
    ask("1. How much memory does each ZeRO stage take? (ZeRO, table 1, from our formulas)")
    found = TABLES["zero-table1"]()
    print(table(found.header, found.rows))


def one_small_gpu() -> None:
    ask("2. Can I train 13B parameters on one 32 GB GPU, in a machine with 1.5 TB of memory?")
    machine = naught.Machine(gpu=GPUS["v100"], host_bytes=1500 * 10**9)
    answer(naught.advise(naught.parse_model("offload-13b"), None, machine, naught.Job()))


def one_h200() -> None:
    ask("3. What is the largest model for one H200 with 125 GiB of memory and 60 GiB of disk?")
    machine = naught.Machine(gpu=GPUS["h200"], host_bytes=125 * 2**30, disk_bytes=60 * 2**30)
    advice = naught.advise(naught.parse_model("7B"), None, machine, naught.Job(micro_batch=8))
    for name, meaning in (("stage0", "plain"), ("stage2-offload", "ZeRO-Offload"), ("pooled", "all memory as one pool")):
        print(f"  {meaning:24} {show_count(advice.largest[name])} parameters")


def a_cluster() -> None:
    ask("4. Does Llama-3 70B fit 16 H100s on two nodes with 1 TB of memory each, and how?")
    machine = naught.Machine(ranks=16, ranks_per_node=8, gpu=GPUS["h100"], host_bytes=10**12)
    answer(naught.advise(naught.parse_model("llama3-70b"), None, machine, naught.Job(micro_batch=1, seq=4096)))


def your_own_module() -> None:
    ask("5. And a module of my own? (on the meta device; its activations are traced, not guessed)")
    import torch
    from torch import nn

    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, norm_first=True)
        module = nn.TransformerEncoder(layer, 24, enable_nested_tensor=False)
    inputs = torch.zeros(8, 512, 2048)
    advice = naught.plan_for(module, (inputs,), machine=naught.Machine(ranks=4, ranks_per_node=4, gpu=GPUS["rtx4090"]))
    print(f"  {sum(param.numel() for param in module.parameters()) / 1e9:.2f}B parameters on four 24 GB GPUs")
    answer(advice)


def your_configuration() -> None:
    ask("6. What is wrong with this DeepSpeed configuration?")
    text = """{
  "train_batch_size": 64, "fp16": {"enabled": true}, "bf16": {"enabled": true},
  "zero_optimization": {"stage": "3", "overlap_com": true, "reduce_bucket_size": 5e8},
  "stage3_max_live_parameters": 1e9
}"""
    print(text + "\n")
    try:
        naught.load_config(text)
    except naught.ConfigError as error:
        print(error)


def answer(advice: naught.Advice) -> None:
    from naught.placement import Tier
    from naught.showing import verdict

    rows = [
        (row.name, *(show_bytes(row.total(tier)) if row.total(tier) else "-" for tier in Tier), "yes" if row.fits else "no")
        for row in advice.forecasts
    ]
    print(table(("placement", "device", "host", "disk", "fits"), rows))
    print(verdict(advice))


if __name__ == "__main__":
    main()
