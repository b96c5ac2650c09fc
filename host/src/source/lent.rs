//! Memory that frames are received into, lent to the groups of a source as their arena.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vnplug_ring::control::RingPlace;

use crate::port::commons::Commons;

/// What a queue lends: the members of groups read its frames where they were received.
///
/// It is one memory for all queues of a source. Whoever has mapped it sees every frame that the
/// source receives, wanted or not, for as long as the source is there.
#[derive(Debug, Clone)]
pub struct Lent {
    /// The queue's arena, the same for all groups.
    pub(crate) commons: Arc<Commons>,
    /// Descriptor of the memory, which nobody but the daemon can write.
    pub(crate) memory: Arc<OwnedFd>,
    /// Bytes of it to map.
    pub(crate) map_len: u64,
    /// Where the queue's arena lies.
    pub(crate) place: RingPlace,
    /// Frames that readers have time for.
    pub(crate) kept: u64,
    /// The longest frame.
    pub(crate) snaplen: u32,
}
