"""The reference executor: plain torch, in any dtype and on any device. Other executors are compared with it."""
