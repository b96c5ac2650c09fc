//! The client protocol.
