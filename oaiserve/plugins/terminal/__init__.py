"""The commands `oaiserve chat`, which talks to a model in the terminal, and `oaiserve launch`, which starts a coding
tool with a server."""

from oaiserve.plugin import Command, Plugin

plugin = Plugin(
    name="terminal",
    commands={
        "chat": Command("Chat with a model in the terminal.", "oaiserve.plugins.terminal.chat"),
        "launch": Command(
            "Start a coding tool, such as codex or claude, with your server.", "oaiserve.plugins.terminal.launch"
        ),
    },
)
