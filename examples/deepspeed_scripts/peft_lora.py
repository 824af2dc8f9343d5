"""Fine-tuning with PEFT's LoRA under any ZeRO stage. Needs `pip install 'naught[hf,peft]'`; nothing is downloaded.

torchrun --nproc_per_node 2 examples/deepspeed_scripts/peft_lora.py --stage 3
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import naught as deepspeed

VOCAB = 128


def main():
    parser = argparse.ArgumentParser(description="PEFT's LoRA under any ZeRO stage")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_head": 4, "n_embd": 64, "vocab_size": VOCAB, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["ln_f"]))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "zero_optimization": {"stage": args.stage},
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    for step in range(args.steps):
        dice = torch.Generator().manual_seed(step * engine.world_size + engine.global_rank)
        tokens = (torch.randint(VOCAB, (4, 1), generator=dice) + torch.arange(16)).remainder(VOCAB).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    engine.eval()
    with torch.no_grad(), engine.gathered():  # whole weights, so that every rank may generate by itself
        made = engine.generate(input_ids=torch.tensor([[1, 2, 3]], device=engine.device), max_new_tokens=5, do_sample=False)
    if engine.global_rank == 0:
        live = engine.report()["live"]
        print(f"loss {loss.item():.4f}, generated {made[0].tolist()}")
        print(f"trained parameters: {sum(param.numel() for param in trained)}; optimizer states {live['states']} bytes on rank 0")


if __name__ == "__main__":
    main()
