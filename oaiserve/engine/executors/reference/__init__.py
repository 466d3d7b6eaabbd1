"""The reference executor: plain torch, in any dtype and on any device. Others are judged by it."""
