"""The parts with which a plug-in starts a model in another way, with torch and transformers.

`oaiserve.engine.start.request` has what a plug-in needs before it imports these.
"""

from oaiserve.engine.decoder.context_length import refuse_longer
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.sources.gguf.file import GgufFile
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata
from oaiserve.engine.model.device import move, select_device
from oaiserve.engine.model.model_config import context_length, select_dtype
from oaiserve.engine.model.transformers_files.empty_model import empty_model, named_parameters
from oaiserve.engine.model.transformers_files.gguf_encoders import ENCODERS, encoder_tensors
from oaiserve.engine.model.transformers_files.gguf_weights import GgufWeights, scale_frequencies
from oaiserve.engine.model.transformers_files.wrapper import text_config
from oaiserve.engine.sequences.step import ChunkResult, Masks, OutOfMemory, Runner, Step, StepResult
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.start.compare import FLOAT32_TOLERANCE, Difference, difference_by_row
from oaiserve.engine.start.load import OF_WEIGHTS, config_of
from oaiserve.engine.start.started import CPU_STEP_TOKENS, GPU_STEP_TOKENS
from oaiserve.system_cpus import default_threads

__all__ = [
    "CPU_STEP_TOKENS",
    "ENCODERS",
    "FLOAT32_TOLERANCE",
    "GPU_STEP_TOKENS",
    "OF_WEIGHTS",
    "ChunkResult",
    "Difference",
    "Fields",
    "GgufFile",
    "GgufWeights",
    "Masks",
    "Metadata",
    "NotKnown",
    "OutOfMemory",
    "Runner",
    "ServedModel",
    "Step",
    "StepResult",
    "config_of",
    "context_length",
    "default_threads",
    "difference_by_row",
    "empty_model",
    "encoder_tensors",
    "move",
    "named_parameters",
    "refuse_longer",
    "scale_frequencies",
    "select_device",
    "select_dtype",
    "text_config",
]
