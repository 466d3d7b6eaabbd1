"""The reference executor: plain torch, in any dtype and on any device. The other executors are compared with it."""
