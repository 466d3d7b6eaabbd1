"""The gateway in front of foreign engines: `oaiserve route --engine`. It passes requests and answers on byte for byte,
and accounts for their time from outside."""
