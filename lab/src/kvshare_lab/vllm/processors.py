"""The tokenizer of the tiny models that take media, and LLaVA's processor, which needs no torchvision."""

from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

IMAGE_TOKEN = 290
IMAGE_SIZE, PATCH_SIZE = 56, 14
TOKENS_OF_AN_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2
_WORDS = 300
_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }} {% else %}w290 {% endif %}"
    "{% endfor %}{% endif %}w4 {% endfor %}"
)


def tokenizer_with_images() -> PreTrainedTokenizerFast:
    """Words `w0` to `w299` with a space between them, of which `w290` is the place of an image."""
    words = models.WordLevel({f"w{index}": index for index in range(_WORDS)}, unk_token="w3")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token="w3",
        eos_token="w2",
        additional_special_tokens=[f"w{IMAGE_TOKEN}"],
        chat_template=_TEMPLATE,
    )


def write_processor(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """LLaVA's, and the names of CLIP's weights as vLLM 0.32 reads them: transformers 5.19 writes others."""
    from transformers import LlavaProcessor  # these need PIL, which comes with vLLM
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    LlavaProcessor(  # type: ignore[no-untyped-call]
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=f"w{IMAGE_TOKEN}",
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    path, tower = folder / "model.safetensors", "vision_tower."
    weights = {
        name.replace(tower, f"{tower}vision_model.") if "vision_model" not in name else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(weights, path, metadata={"format": "pt"})
