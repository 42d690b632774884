"""What people write with transformers, peft and DeepSpeed: `deepspeed start_up_peer.py MODEL ROWS OUT zero2`.

One optimizer step of LoRA on one chat a rank; rank 0 appends a line of JSON to OUT when it has come to each stage.
"""

import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("rows")
parser.add_argument("out")
parser.add_argument("zero", choices=["zero2", "zero3"])
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()


def mark(stage: str) -> None:
    """Note the time, on rank 0."""
    if os.environ["RANK"] == "0":
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": stage, "time": time.time()}) + "\n")


mark("first line of a rank")
import deepspeed  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer  # noqa: E402
from transformers.integrations import HfDeepSpeedConfig  # noqa: E402

mark("imports")
on_gpu = torch.cuda.is_available()
world = int(os.environ["WORLD_SIZE"])
if on_gpu:
    torch.cuda.set_device(args.local_rank)
else:  # DeepSpeed would compile an operator for two minutes
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("nccl" if on_gpu else "gloo")
device = torch.device("cuda", args.local_rank) if on_gpu else torch.device("cpu")
stage = int(args.zero[-1])
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "train_batch_size": world,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": stage, "overlap_comm": on_gpu},
    "zero_allow_untested_optimizer": True,
}
keep = HfDeepSpeedConfig(config) if stage == 3 else None
tokenizer = AutoTokenizer.from_pretrained(args.model)
with open(args.rows, encoding="utf-8") as file:
    rows = [json.loads(line) for line in file][:world]
mark("process group, tokenizer, rows")
kind = AutoModelForImageTextToText if hasattr(AutoConfig.from_pretrained(args.model), "vision_config") else None
if kind is None:
    from transformers import AutoModelForCausalLM as kind
# Straight to the GPU is the faster of what it offers; under ZeRO-3 transformers refuses a device.
place = {"device_map": {"": args.local_rank}} if on_gpu and stage != 3 else {}
model = kind.from_pretrained(args.model, dtype=torch.bfloat16, **place)
mark("from_pretrained")
pattern = r"(?!.*visual).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules=pattern))
model.enable_input_require_grads()
model.gradient_checkpointing_enable()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trained, config=config)
mark("peft, deepspeed.initialize")
row = rows[int(os.environ["RANK"]) % len(rows)]
ids = tokenizer.apply_chat_template(row["messages"], return_tensors="pt", return_dict=True)["input_ids"].to(device)
loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
engine.backward(loss)
engine.step()
print(f"loss {float(loss.detach()):.4f} on {ids.numel()} tokens")
if on_gpu:
    torch.cuda.synchronize()
mark("first step")
