"""Local stand-ins for the tiny models and the data set that TRL's tests load from the Hub."""

import json
from pathlib import Path

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode


ORGANIZATION = "trl-internal-testing"
DATASET = f"{ORGANIZATION}/zen"
REVISION = "0" * 40
REMOTE = "tiny-RemoteForCausalLM"
SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Type of each model, its chat template, and options of its configuration
MODELS = {
    "tiny-Cohere2ForCausalLM": ("cohere2", "cohere2", {"logit_scale": 1.0}),
    "tiny-Gemma2ForCausalLM": ("gemma2", "gemma", {"head_dim": 2}),
    "tiny-Glm4MoeForCausalLM": (
        "glm4_moe", "glm4moe", {**EXPERTS, "head_dim": 2, "n_routed_experts": 4, "attention_bias": True, "use_qk_norm": True}
    ),
    "tiny-GptOssForCausalLM": ("gpt_oss", "gptoss", {**EXPERTS, "num_local_experts": 4}),
    "tiny-LlamaForCausalLM-3.2": ("llama", "llama3_2", {}),
    "tiny-LlamaForSequenceClassification-3.2": ("llama", "llama3_2", {}),
    REMOTE: ("llama", "llama3_2", {}),
    "tiny-MistralForCausalLM-0.2": ("mistral", "llama3", {}),
    "tiny-NemotronHForCausalLM-nano": (
        "nemotron_h",
        "nemotron_3_nano",
        {
            **EXPERTS, "hidden_size": 16, "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8,
            "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16, "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 32, "use_mamba_kernels": False,
        },
    ),
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", "qwen2_5", {}),
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", "qwen2_5", {}),
    "tiny-Qwen3ForCausalLM": ("qwen3", "qwen3", {}),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", "qwen3", {}),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
}  # fmt: skip

# A few tests recite replies as token ids of Qwen's tokenizer. These are the ids that are not single bytes, with their texts
QWEN_SIZE = 151_936
SPECIAL = {
    151_643: "<|endoftext|>",
    151_644: "<|im_start|>",
    151_645: "<|im_end|>",
}
MARKS = {
    151_657: "<tool_call>",
    151_658: "</tool_call>",
    151_665: "<tool_response>",
    151_666: "</tool_response>",
    151_667: "<think>",
    151_668: "</think>",
}
WORDS = {
    293: " b", 314: " {", 330: ' "', 397: ">\n", 411: "ut", 450: "de", 497: '",', 510: '("', 522: "</", 606: "name",
    788: '":', 894: " any", 927: "sho", 944: "'t", 1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"',
    5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}\n", 13477: "crement",
    14172: "tool", 16252: " increment", 16370: "arguments", 17453: "Done", 22785: "_tool", 35744: "increment",
    64648: "multiply", 93054: "_multiply", 95642: '"}}\n',
}  # fmt: skip
PROMPTS = [f"The number that comes {place} {number} is" for number in range(2, 12) for place in ("after", "before")]


def make_tokenizer(template: str, qwen_ids: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with one of TRL's chat templates, and with the ids of Qwen's tokenizer or as few as there can be."""
    letters = bytes_to_unicode()  # those of bytes that stand for themselves come first
    vocabulary = {letter: token for token, letter in enumerate(letters.values())}
    vocabulary |= {"".join(letters[byte] for byte in text.encode()): token for token, text in WORDS.items()}
    vocabulary |= {text: token for token, text in (SPECIAL | MARKS).items()}
    if qwen_ids:
        known = set(vocabulary.values())
        vocabulary |= {f"{letters[ord(' ')]}w{token}": token for token in range(QWEN_SIZE) if token not in known}
    else:
        vocabulary = {text: token for token, text in enumerate(vocabulary)}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS.values()])
    templates = Path(trl.__file__).parent / "chat_templates"
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=(templates / f"{template}.jinja").read_text(),
    )


def make_model(name: str, tokenizer: PreTrainedTokenizerFast) -> nn.Module:
    """A model with random weights that are large enough for every one of them to have a gradient."""
    model_type, _, options = MODELS[name]
    torch.manual_seed(0)
    kind = {"num_labels": 1} if "SequenceClassification" in name else {}
    config = AutoConfig.for_model(
        model_type,
        **SIZES | kind | options,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = (AutoModelForSequenceClassification if kind else AutoModelForCausalLM).from_config(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model


def write_hub(cache: Path, qwen_ids: bool) -> None:
    """Writes the models as a cache of the Hub, where `HF_HUB_CACHE` finds them."""
    for name, (_, template, _) in MODELS.items():
        repository = cache / f"models--{ORGANIZATION}--{name}"
        if (repository / "refs" / "main").is_file():
            continue
        snapshot = repository / "snapshots" / REVISION
        tokenizer = make_tokenizer(template, qwen_ids)
        make_model(name, tokenizer).save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        if name == REMOTE:
            add_code(snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(REVISION)


def add_code(snapshot: Path) -> None:
    """Makes a saved Llama a model whose class is in a file beside it."""
    (snapshot / "remote.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        'class RemoteConfig(LlamaConfig):\n    model_type = "remote"\n\n\n'
        "class RemoteForCausalLM(LlamaForCausalLM):\n    config_class = RemoteConfig\n"
    )
    config = json.loads((snapshot / "config.json").read_text())
    classes = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.RemoteForCausalLM"}
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"], "auto_map": classes}
    (snapshot / "config.json").write_text(json.dumps(config))


def write_dataset(folder: Path, num_rows: int) -> None:
    """Writes the data set with `num_rows` training rows: prompts as text and as chats."""
    for name, rows in (
        ("standard_prompt_only", PROMPTS),
        ("conversational_prompt_only", [[{"role": "user", "content": prompt}] for prompt in PROMPTS]),
    ):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split, part in (("train", rows[:num_rows]), ("test", rows[num_rows : num_rows + 2])):
            lines = "".join(json.dumps({"prompt": row}) + "\n" for row in part)
            (folder / name / f"{split}.jsonl").write_text(lines)
