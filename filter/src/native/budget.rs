//! What native code takes, counted while it lives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A number that goes up when something is made and down when it is gone.
#[derive(Debug, Clone, Default)]
pub(super) struct Gauge(Arc<AtomicU64>);

impl Gauge {
    pub(super) fn now(&self) -> u64 {
        // Relaxed: a count, nothing is published through it.
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `n` until what is returned is dropped.
    pub(super) fn hold(&self, n: u64) -> Held {
        self.0.fetch_add(n, Ordering::Relaxed);
        Held {
            gauge: self.clone(),
            n,
        }
    }

    /// Nobody holds anything, nor could.
    pub(super) fn is_idle(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}

/// A part of a [`Gauge`].
#[derive(Debug)]
pub(super) struct Held {
    gauge: Gauge,
    n: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gauge.0.fetch_sub(self.n, Ordering::Relaxed);
    }
}
