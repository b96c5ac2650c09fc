//! Where in an area what lies.
//!
//! ```text
//! 0        nothing: a page of zeroes, so that a null pointer leads to nothing of interest
//! CONTEXT  struct xdp_md or struct __sk_buff
//! STACK    512 bytes for each function that is called, the first at the top
//! PACKET   room before the frame, the frame, room behind it
//! MAPS     the maps, each from the begin of a page
//! ```
//!
//! The area is a power of two long, and all of it is mapped, also what nothing lies in.

use crate::check::MAX_DEPTH;

/// Bytes of a page.
pub(crate) const PAGE: u32 = 4096;
/// Where the context lies.
pub(crate) const CONTEXT: u32 = PAGE;
/// Bytes of the stack of one function (`MAX_BPF_STACK`).
pub(crate) const FRAME_STACK: u32 = 512;
/// Where the stack ends, at which the first function's begins.
pub(crate) const STACK_END: u32 = 2 * PAGE + MAX_DEPTH as u32 * FRAME_STACK;
/// Where the room for frames begins.
pub(crate) const ROOM: u32 = STACK_END.next_multiple_of(PAGE);
/// Bytes before the frame (`XDP_PACKET_HEADROOM`).
pub(crate) const HEADROOM: u32 = 256;
/// Where frames begin.
pub(crate) const PACKET: u32 = ROOM + HEADROOM;
/// The longest frame.
pub const MAX_FRAME: u32 = 68 << 10;
/// Bytes behind the longest frame.
const TAILROOM: u32 = 320;
/// Where the room for frames ends.
pub(crate) const ROOM_END: u32 = (PACKET + MAX_FRAME + TAILROOM).next_multiple_of(PAGE);
/// Where maps begin.
pub(crate) const MAPS: u32 = ROOM_END;

/// The most that all maps of a program may take.
pub(crate) const MAX_MAPS: u64 = 256 << 20;

/// Where maps of these lengths lie, and how long the area is.
pub(crate) fn lay_out(lens: impl Iterator<Item = u64>) -> Option<(Vec<u32>, u32)> {
    let mut end = u64::from(MAPS);
    let mut places = Vec::new();
    for len in lens {
        places.push(u32::try_from(end).ok()?);
        end = end.checked_add(len.next_multiple_of(PAGE.into()))?;
        if end > MAX_MAPS {
            return None;
        }
    }
    let bytes = u32::try_from(end.next_power_of_two()).ok()?;
    Some((places, bytes))
}
