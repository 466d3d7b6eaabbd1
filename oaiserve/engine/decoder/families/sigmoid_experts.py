"""GLM-4.5, MiniMax M2 and others that choose experts by the sigmoids of their scores plus a bias."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.experts import after_dense_layers, by_mlp_types, grouped_mixture
from oaiserve.engine.decoder.facts import Facts, Mixture, llama, windows_by_type
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.softmax_experts import MIXTRAL
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_MINIMAX: Names = {
    **MIXTRAL,
    "choice_bias": ("mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"),
}
_EXAONE: Names = {"choice_bias": ("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias")}


def _minimax_m2(settings: Settings) -> Facts:
    mixture = Mixture(
        num_experts=settings["num_local_experts"],
        top_k=settings["num_experts_per_tok"],
        is_sigmoid=True,
        has_choice_bias=True,
    )
    return replace(llama(settings), mixture=mixture)


def _glm4_moe(settings: Settings) -> Facts:
    mixture = grouped_mixture(settings, after_dense_layers(settings), settings["n_routed_experts"])
    mtp_layers = settings.get("num_mtp_layers", 1) or 0  # GLM-4.5V has one; its config.json doesn't say so
    return replace(llama(settings), mtp_layers=mtp_layers, mixture=mixture)


def _dots1(settings: Settings) -> Facts:
    mixture = grouped_mixture(settings, after_dense_layers(settings), settings["n_routed_experts"])
    return replace(llama(settings), windows=windows_by_type(settings), mixture=mixture)


def _exaone_moe(settings: Settings) -> Facts:
    windows = windows_by_type(settings)
    has_windows = settings["sliding_window"] is not None
    return replace(
        llama(settings),
        windows=windows,
        rotates=tuple(window is not None or not has_windows for window in windows),
        mixture=grouped_mixture(settings, by_mlp_types(settings), settings["num_experts"]),
    )


def _solar_open(settings: Settings) -> Facts:
    return replace(llama(settings), mixture=grouped_mixture(settings, None, settings["n_routed_experts"]))


FAMILIES = (
    Family(type="minimax_m2", facts=_minimax_m2, other_names=_MINIMAX),
    *(Family(type=name, facts=_glm4_moe) for name in ("glm4_moe", "glm4v_moe_text")),
    Family(type="dots1", facts=_dots1),
    Family(type="exaone_moe", facts=_exaone_moe, other_names=_EXAONE),
    Family(type="solar_open", facts=_solar_open),
)
