"""The metrics that no dashboard or rule uses, each with the reason. A new metric has a panel, or a line here."""

REASONS = {
    "oaiserve_build_info": "It never changes. Queries join it for the version.",
    "oaiserve_engine_feature": "It never changes after the start.",
    "oaiserve_finished_choices_total": "How choices end depends on clients and models, and asks for no action.",
    **dict.fromkeys(
        ("oaiserve_speech_sound_seconds_total", "oaiserve_speech_decode_seconds_total"),
        "They are 0 but on servers of speech, whose phases are in the panels of all requests.",
    ),
    **dict.fromkeys(
        ("oaiserve_run_turns", "oaiserve_run_tool_seconds", "oaiserve_run_reused_ratio"),
        "They describe agents, and the page of each run has more to say.",
    ),
}
