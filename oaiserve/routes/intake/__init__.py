"""How bytes become an `Intake`: bodies and their codings, types, parameters and adaptations, media."""
