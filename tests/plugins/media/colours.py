"""Makes a model that reads pictures: the demo answers, and it sees the colour that fills the middle of a picture.

The package index has no model that reads pictures. This one has the shape of LLaVA, the demo's text model, and a small
tower with random weights. The last matrix after the tower is fitted so that a picture of a colour becomes the word.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from oaiserve.checkpoints import demo

COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 80, 200)}
_SIDE = 28  # pixels, which one vector stands for
_SHADES = np.linspace(0.8, 1.05, 6)
_VECTOR = "<image>"
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>\n{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def filled(colour: str, shade: float = 1.0, side: int = 64) -> Image.Image:
    red, green, blue = (min(255, round(shade * part)) for part in COLOURS[colour])
    return Image.new("RGB", (side, side), (red, green, blue))


def save_reader_of_colours(folder: Path) -> None:
    """Save the model, whole. The demo must be there."""
    source = demo.fetched()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(_VECTOR, special=True, normalized=False)]},
        replace_extra_special_tokens=False,
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE}, resample=Image.Resampling.BILINEAR
    )
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(
        f'{{"patch_size": {_SIDE}, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}}'
    )
    text = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    text.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64, mean_resizing=False)
    model = _with_tower(text, tokenizer.convert_tokens_to_ids(_VECTOR))
    words = torch.tensor([tokenizer(colour).input_ids[0] for colour in COLOURS for _ in _SHADES])
    shades = images([filled(colour, shade) for colour in COLOURS for shade in _SHADES], return_tensors="pt")
    _fit(model, shades.pixel_values, text.get_input_embeddings()(words))
    model.to(torch.bfloat16).save_pretrained(folder)


def _with_tower(text: torch.nn.Module, vector_id: int) -> LlavaForConditionalGeneration:
    """Return the model with this text model, and with a tower of random weights."""
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, projection_dim=64,
        image_size=_SIDE, patch_size=_SIDE,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision,
        text_config=text.config,
        image_token_index=vector_id,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    return model.eval()


@torch.no_grad()
def _fit(model: LlavaForConditionalGeneration, pixels: torch.Tensor, wanted: torch.Tensor) -> None:
    """Set the last matrix after the tower so that the vector of each picture is the wanted one."""
    projector = model.model.multi_modal_projector
    features = model.model.vision_tower(pixels).last_hidden_state[:, 1:]
    features = projector.act(projector.linear_1(features))[:, 0]
    projector.linear_2.bias.zero_()
    projector.linear_2.weight.copy_(torch.linalg.lstsq(features, wanted, driver="gelsd").solution.T)
