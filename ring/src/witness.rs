//! What generated frames carry.
