//! Back-ends and their programs follow the grants while the daemon runs.
//!
//! ```text
//!   grants change ──┬── whose process may not be the back-end any more: all its channels end, then its connection
//!                   └── who may not use it any more: its channels end, as by `vnplug revoke`
//! ```
//!
//! Memory of a channel that ends this way is withdrawn as of any other: its program has some time to let go, then it
//! is emptied. What a back-end has more of than it may (`memory`, `channels`) it keeps; it gets no more.

use std::time::Instant;

use super::Control;
use crate::control::session::Over;
use crate::hub::BackendGrant;

/// Why a back-end's connection ends, and what its programs are told.
const NOT_GRANTED: &str =
    "an operator changed the grants, which do not permit the back-end any more";

impl Control {
    /// Other back-ends may be from now on.
    pub(in crate::control) fn set_back_ends(&mut self, grants: &[BackendGrant]) {
        self.backends.registry.set_grants(grants.to_vec());
    }

    /// Ends what the grants do not permit any more: of back-ends, and of their programs. When this returns nothing
    /// more is said in it. The connection that asked for it goes on in any case.
    pub(in crate::control) fn judge_back_ends(&mut self, asked_by: u64) {
        for (token, name, viewer) in self.backends.registry.not_permitted(&self.policy) {
            log::info!(target: "backend", "{viewer:?} may not be back-end {name:?} any more");
            let ended = self.backends.registry.gone(token, None, NOT_GRANTED);
            self.channels_are_over(ended);
            if token != asked_by {
                // Its library registers again, and is told that it may not.
                self.end(token, &Over::Misbehaved(NOT_GRANTED));
            }
        }
        let ended = self.backends.registry.revoke_not_permitted(&self.policy);
        if !ended.is_empty() {
            log::info!(
                target: "backend",
                "the grants do not permit {} channels of back-ends any more",
                ended.len()
            );
        }
        self.channels_are_over(ended);
    }

    /// The programs of these channels have some time to let go of memory.
    pub(super) fn channels_are_over(&mut self, channels: Vec<u32>) {
        let now = Instant::now();
        for channel in channels {
            self.backends.regions.channel_is_over(channel, now);
        }
    }
}
