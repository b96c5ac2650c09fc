//! The header of a ring: laid by the host, looked at once by its peer.

use std::sync::atomic::Ordering;

use crate::arena::DESCRIPTORS_MAGIC;
use crate::consumer::AttachError;
use crate::layout::{
    DATA_OFFSET, Geometry, HEAD, Life, MAX_CAPACITY, MAX_SNAPLEN, MIN_CAPACITY, PUBLISHED, READ,
    TAIL, VERSION_MAJOR, VERSION_MINOR, header, record_size, ring_size,
};
use crate::producer::CreateError;
use crate::region::Region;

/// Lays an empty, open ring into `region`, which may hold anything: every position and count is
/// `start`, the life lies at `life`, and `magic` says which kind of ring it is.
pub(crate) fn lay(
    region: &Region,
    geometry: &Geometry,
    magic: u64,
    life: u64,
    start: u64,
) -> Result<(), CreateError> {
    let Geometry {
        capacity,
        snaplen,
        link_type,
        epoch,
        port,
        queue,
    } = *geometry;
    if !capacity.is_power_of_two() || !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
        return Err(CreateError::Capacity(capacity));
    }
    // Any record fits an empty ring even after the longest padding; descriptors always do.
    let fits = magic == DESCRIPTORS_MAGIC || 2 * record_size(snaplen) <= capacity;
    if snaplen > MAX_SNAPLEN || !fits {
        return Err(CreateError::Snaplen(snaplen));
    }
    if epoch == 0 || epoch & 0xff != 0 {
        return Err(CreateError::Epoch(epoch));
    }
    let need = ring_size(capacity);
    if region.len() < need {
        return Err(CreateError::Region {
            need,
            have: region.len(),
        });
    }
    // The words of an earlier ring must not count. Its records may stay: nobody reads what was not
    // published, and the memory is fresh (all zero) or the same VM's. Clearing it would keep the
    // caller for as long as a ring is large.
    region.clear(0, DATA_OFFSET);
    let versions =
        u64::from(VERSION_MAJOR) | u64::from(VERSION_MINOR) << 16 | u64::from(link_type) << 32;
    let words = [
        (header::MAJOR, versions),
        (header::EPOCH, epoch),
        (header::CAPACITY, capacity),
        (header::DATA, DATA_OFFSET),
        (header::SNAPLEN, u64::from(snaplen) | u64::from(port) << 32),
        (header::QUEUE, u64::from(queue)),
        (life, epoch | Life::Open as u64),
        (HEAD, start),
        (PUBLISHED, start),
        (TAIL, start),
        (READ, start),
        // Release: the magic comes last, so that a peer that sees it sees the rest.
        (header::MAGIC, magic),
    ];
    for (offset, word) in words {
        region.store_u64(offset, word, Ordering::Release);
    }
    Ok(())
}

/// Copies the geometry of the ring of this kind at the start of `region`.
pub(crate) fn look(region: &Region, magic: u64) -> Result<Geometry, AttachError> {
    if region.len() < DATA_OFFSET {
        return Err(AttachError::Geometry("region", region.len()));
    }
    // Acquire: pairs with the Release of the magic in `lay`.
    let found = region.load_u64(header::MAGIC, Ordering::Acquire);
    if found != magic {
        return Err(AttachError::Magic(found));
    }
    let word = |offset| region.load_u64(offset, Ordering::Relaxed);
    let major = word(header::MAJOR) as u16;
    if major != VERSION_MAJOR {
        return Err(AttachError::Version(major));
    }
    let geometry = Geometry {
        capacity: word(header::CAPACITY),
        snaplen: word(header::SNAPLEN) as u32,
        link_type: (word(header::MAJOR) >> 32) as u32,
        epoch: word(header::EPOCH),
        port: (word(header::SNAPLEN) >> 32) as u32,
        queue: word(header::QUEUE) as u32,
    };
    let Geometry {
        capacity, snaplen, ..
    } = geometry;
    if !capacity.is_power_of_two()
        || !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity)
        || ring_size(capacity) > region.len()
    {
        return Err(AttachError::Geometry("capacity", capacity));
    }
    if word(header::DATA) != DATA_OFFSET {
        return Err(AttachError::Geometry("data offset", word(header::DATA)));
    }
    if snaplen > MAX_SNAPLEN {
        return Err(AttachError::Geometry("snaplen", u64::from(snaplen)));
    }
    Ok(geometry)
}
