//! The reader's end of a ring: next → release, and going to sleep without missing a wake-up.
//!
//! The reader trusts the host, so it may look at records where they lie. It still checks every
//! length against the geometry it copied at attach: a ring that was closed and its memory reused
//! shows as [`Corrupt`] or as [`Life::Closed`], not as a crash.

mod errors;
mod record;
mod shared;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::layout::{
    ALIGN, ATTACHED, DATA_OFFSET, DROPPED, Geometry, HEAD, LIFE, Life, MAGIC, Meta, PAD, PUBLISHED,
    READ, RECORD_HEADER, TAIL, WAKE_SEQ, flags, header, reached, record_size,
};
use crate::posted::{Hold, Mark, Posts};
use crate::region::Region;
use crate::wake;

pub use errors::{AttachError, Corrupt};
use record::Taken;
pub(crate) use record::{read_meta, read_offload};
use shared::GroupSide;
pub use shared::Look;

/// The reader's end of one ring.
#[derive(Debug)]
pub struct Consumer {
    /// What is held back for transmit rings that name places of it. Dropped first: they name none any more when it is unmapped.
    holds: Vec<Hold>,
    region: Region,
    /// What this reader writes: in the ring, or in memory of its own.
    words: Region,
    geometry: Geometry,
    head: u64,
    tail: u64,
    released: u64,
    read: u64,
    wake_seq: u32,
    /// Captured bytes that a record has at least, and how many more at most.
    least: u32,
    span: u32,
    /// Its words lie beside it: another member of a trust group writes it.
    is_beside: bool,
    /// Such a writer is gone, or wrote what cannot be: nothing is looked for any more.
    is_over: bool,
    /// Bits of `flags` that a record of such a writer may have.
    flags: u16,
    /// The ring holds descriptors of packets that lie elsewhere.
    shared: Option<Box<GroupSide>>,
}

/// One packet, lent from the ring until [`Consumer::release`].
#[derive(Debug, Clone, Copy)]
pub struct Packet<'a> {
    /// Everything but the bytes.
    pub meta: Meta,
    /// The captured bytes, Ethernet header included, FCS excluded.
    pub bytes: &'a [u8],
}

/// What [`Consumer::arm`] found. The doorbell stays armed in every case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The watermark or half of the ring is reached already, or its life is over: do not sleep. In a
    /// group also: packets came between the last one that was taken and this arming.
    Ready,
    /// Nothing is unread: sleep until the doorbell, the host keeps the time.
    Sleep,
    /// Some packets are unread, fewer than the watermark. The host may have looked at them before
    /// this arming and never look again: sleep until the doorbell, but at most these microseconds.
    SleepAtMost(u32),
}

impl Consumer {
    /// Attaches to the ring at the start of `region`, at its current tail.
    ///
    /// # Errors
    /// [`AttachError`] if the header is not that of a ring of this version.
    pub fn attach(region: Region) -> Result<Self, AttachError> {
        Self::attach_kind(region, MAGIC)
    }

    /// Attaches to the ring of packets with this `epoch` at the start of `region`, of which nothing is ever
    /// written; this reader's words lie in `words`, at the same offsets, and start anew. No record of it has
    /// more captured bytes than `most`, nor [`flags::OFFLOAD`] unless `merged`. `Ok(None)`: it is not laid yet.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn attach_beside(
        region: Region,
        words: Region,
        epoch: u64,
        (most, merged): (u32, bool),
    ) -> Result<Option<Self>, AttachError> {
        if words.len() < DATA_OFFSET {
            return Err(AttachError::Geometry("words", words.len()));
        }
        if region.len() < DATA_OFFSET {
            return Err(AttachError::Geometry("region", region.len()));
        }
        // Acquire: pairs with the Release in `lay`. First, for until it is this one the rest may be that of
        // a ring before, half overwritten.
        if region.load_u64(header::EPOCH, Ordering::Acquire) != epoch {
            return Ok(None);
        }
        let mut geometry = match crate::header::look(&region, MAGIC) {
            Ok(geometry) if geometry.epoch == epoch => geometry,
            Ok(_) | Err(AttachError::Magic(0)) => return Ok(None),
            Err(error) => return Err(error),
        };
        geometry.snaplen = geometry.snaplen.min(most);
        if geometry.snaplen < SHORTEST {
            return Err(AttachError::Geometry("snaplen", geometry.snaplen.into()));
        }
        words.clear(TAIL, ATTACHED - TAIL);
        // Release: pairs with the Acquire in Producer::is_attached.
        words.store_u64(ATTACHED, epoch, Ordering::Release);
        Ok(Some(Self {
            region,
            words,
            geometry,
            head: 0,
            tail: 0,
            released: 0,
            read: 0,
            wake_seq: 0,
            least: SHORTEST,
            span: geometry.snaplen - SHORTEST,
            is_beside: true,
            is_over: false,
            flags: if merged { flags::OFFLOAD } else { 0 },
            shared: None,
            holds: Vec::new(),
        }))
    }

    fn attach_kind(region: Region, kind: u64) -> Result<Self, AttachError> {
        let geometry = crate::header::look(&region, kind)?;
        let word = |offset| region.load_u64(offset, Ordering::Relaxed);
        let tail = word(TAIL);
        if !tail.is_multiple_of(ALIGN) {
            return Err(AttachError::Geometry("tail", tail));
        }
        let read = word(READ);
        let wake_seq = region.load_u32(WAKE_SEQ, Ordering::Relaxed);
        Ok(Self {
            words: region.clone(),
            region,
            geometry,
            head: tail,
            tail,
            released: tail,
            read,
            wake_seq,
            least: 1,
            span: geometry.snaplen.saturating_sub(1),
            is_beside: false,
            is_over: false,
            flags: u16::MAX,
            shared: None,
            holds: Vec::new(),
        })
    }

    /// Whether another member of a trust group writes the ring, and not the host
    /// ([`attach_beside`](Self::attach_beside)). After a [`Corrupt`] such a ring is drained for good.
    #[inline]
    pub fn is_beside(&self) -> bool {
        self.is_beside
    }

    /// The writer of such a ring is gone: what it published until now is read, and nothing more.
    pub fn see_off(&mut self) {
        self.refresh();
        self.is_over = true;
    }

    /// The geometry copied at attach.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// The next packet, or `None` when nothing is published. Lent until
    /// [`release`](Self::release).
    ///
    /// # Errors
    /// [`Corrupt`] if the record is impossible.
    #[inline]
    #[expect(clippy::should_implement_trait, reason = "a lending iterator")]
    pub fn next(&mut self) -> Result<Option<Packet<'_>>, Corrupt> {
        if self.shared.is_some() {
            self.stage(false)?;
            return Ok(self.take_staged().map(|taken| self.lend(taken)));
        }
        if self.tail == self.head {
            self.refresh();
        }
        Ok(self.take()?.map(|taken| self.lend(taken)))
    }

    /// Up to `max` packets without looking for newly published ones in between; all are lent until
    /// [`release`](Self::release).
    #[inline]
    pub fn batch(&mut self, max: usize) -> Batch<'_> {
        self.begin_copies();
        self.refresh();
        Batch {
            consumer: self,
            left: max,
            rest: Rest::Anywhere,
        }
    }

    /// As [`batch`](Self::batch), but ends before the end of the record area: the packets lie one
    /// after the other in memory, with their headers and padding in between.
    #[inline]
    pub fn span(&mut self, max: usize) -> Batch<'_> {
        self.begin_copies();
        self.refresh();
        Batch {
            consumer: self,
            left: max,
            rest: Rest::BehindTheNext,
        }
    }

    /// Gives the room of every packet taken so far back to the host. Once per batch.
    #[inline]
    pub fn release(&mut self) {
        if !self.holds.is_empty() {
            return self.release_unposted();
        }
        let (tail, read) = (self.tail, self.read);
        self.release_to(Mark { tail, read });
    }

    /// Where its record area lies: the first address, and its bytes.
    pub fn area(&self) -> (usize, usize) {
        let capacity = self.geometry.capacity;
        let area = self.region.address(DATA_OFFSET, capacity);
        (area.addr(), capacity as usize)
    }

    /// From now on what is [noted](Posts::note) there is held back until it was sent. Of a ring of packets.
    pub fn hold_for(&mut self, posts: Arc<Posts>) {
        // What was taken since may be posted yet.
        let (tail, read) = (self.released, self.words.load_u64(READ, Ordering::Relaxed));
        self.holds.push(Hold::new(posts, Mark { tail, read }));
    }

    /// Whether room that was released is held back, so that it is to be released again.
    #[inline]
    pub fn holds_back(&self) -> bool {
        self.holds.iter().any(Hold::holds_back)
    }

    /// As [`release`](Self::release), of what no transmit ring names any more.
    #[inline(never)]
    fn release_unposted(&mut self) {
        let (tail, read) = (self.tail, self.read);
        let now = Mark { tail, read };
        let mut upto = now;
        for hold in &mut self.holds {
            let given = hold.release(now);
            if reached(upto.tail, given.tail) {
                upto = given;
            }
        }
        self.holds.retain(|hold| !hold.is_done());
        self.release_to(upto);
    }

    #[inline(always)]
    fn release_to(&mut self, mark: Mark) {
        if self.released != mark.tail {
            // Release: pairs with the Acquire in Producer::refresh_tail.
            self.words.store_u64(TAIL, mark.tail, Ordering::Release);
            // Release: after `tail`, so that a reader that dies in between leaves a count that is
            // too low, which `arm` corrects; never one too high, which would sleep too long.
            self.words.store_u64(READ, mark.read, Ordering::Release);
            self.released = mark.tail;
        }
    }

    /// Releases, and asks to be rung once: when `watermark` packets (at least 1) or more than half of
    /// the ring are unread, or `max_delay_us` after the first of them; in a group also when half of
    /// the arena was overwritten since the first of them. A watermark of 1 rings at the first packet.
    ///
    /// The order that misses no wake-up: empty the doorbell, take packets until there are none,
    /// `arm`, then sleep as the answer says. Waking early is harmless.
    pub fn arm(&mut self, watermark: u32, max_delay_us: u32) -> Wait {
        self.release();
        self.arm_lent(watermark, max_delay_us)
    }

    /// As [`arm`](Self::arm), but what was taken stays lent: for a reader that sleeps while somebody
    /// looks at its last packet. The room of that packet comes back with the next release.
    pub fn arm_lent(&mut self, watermark: u32, max_delay_us: u32) -> Wait {
        let is_first = self.is_first_arming();
        loop {
            let wake_at = self.read.wrapping_add(u64::from(watermark.max(1)));
            self.wake_seq = self.wake_seq.wrapping_add(1);
            wake::arm(&self.words, wake_at, max_delay_us, self.wake_seq);
            // Acquire: pairs with the Release in Producer::publish; `head` is at least as new.
            let published = self.region.load_u64(PUBLISHED, Ordering::Acquire);
            self.refresh();
            if self.is_beside {
                // A member may say of counts and lives what it likes.
                return match self.tail == self.head {
                    true => Wait::Sleep,
                    false => Wait::Ready,
                };
            }
            if self.life() != Life::Open {
                return Wait::Ready;
            }
            match (self.tail == self.head, reached(published, wake_at)) {
                (false, true) => return Wait::Ready,
                (false, false) if watermark <= 1 || max_delay_us == 0 => return Wait::Ready,
                (false, false) if is_first => return Wait::Ready,
                (false, false)
                    if self.head.wrapping_sub(self.tail) > self.geometry.capacity / 2 =>
                {
                    return Wait::Ready;
                }
                (false, false) => return Wait::SleepAtMost(max_delay_us),
                (true, false) => return Wait::Sleep,
                // Nothing is unread, yet the counts say so: an earlier reader of this ring died
                // between `tail` and its count. `published` is not ahead of what we have read.
                (true, true) => self.read = published,
            }
        }
    }

    /// Where the ring is in its life. [`Life::Closed`] also if its memory serves another ring now.
    pub fn life(&self) -> Life {
        let word = self.region.load_u64(LIFE, Ordering::Acquire);
        if word & !0xff != self.geometry.epoch {
            Life::Closed
        } else {
            Life::from_word(word)
        }
    }

    /// True when every published packet was taken, or lost.
    #[inline]
    pub fn is_drained(&mut self) -> bool {
        if self.shared.is_some() {
            // What is corrupt is for the taker to tell.
            return matches!(self.stage(false), Ok(false));
        }
        if self.tail == self.head {
            self.refresh();
        }
        self.tail == self.head
    }

    /// Packets this reader lost: for want of room, as the host last published it, and those that
    /// were [`recycled`](Self::recycled).
    pub fn dropped(&self) -> u64 {
        self.region.load_u64(DROPPED, Ordering::Relaxed) + self.recycled()
    }

    /// Packets that were published and not taken, as the host last published their count.
    pub fn unread(&self) -> u64 {
        // Acquire: pairs with the Release in Producer::publish.
        let published = self.region.load_u64(PUBLISHED, Ordering::Acquire);
        // NB: the count may be behind `head`, of which more was taken already.
        match published.wrapping_sub(self.read) {
            unread if unread < 1 << 63 => unread,
            _ => 0,
        }
    }

    /// Packets taken since the ring was made, by this reader and those before it.
    pub fn taken(&self) -> u64 {
        self.read
    }

    #[cfg(test)]
    pub(crate) fn position(&self) -> u64 {
        self.tail
    }

    #[inline]
    fn refresh(&mut self) {
        // Acquire: pairs with the Release in Producer::publish; the records are visible.
        let head = self.region.load_u64(HEAD, Ordering::Acquire);
        // A head that is behind or too far ahead belongs to another ring in the same memory.
        if head.wrapping_sub(self.tail) <= self.geometry.capacity && !self.is_over {
            self.head = head;
        }
    }

    /// True if the next packet lies at the start of the record area.
    #[inline]
    fn is_at_wrap(&self) -> bool {
        // Copies lie one after the other.
        if self.shared.is_some() {
            return false;
        }
        let offset = self.tail & (self.geometry.capacity - 1);
        // Nothing is written at `head` yet, where `take` finds nothing anyway.
        let pad = || {
            self.tail != self.head
                && self
                    .region
                    .load_u32(DATA_OFFSET + offset, Ordering::Relaxed)
                    == PAD
        };
        offset == 0 || pad()
    }

    #[inline(always)]
    fn take(&mut self) -> Result<Option<Taken>, Corrupt> {
        if self.shared.is_some() {
            return self.take_copy();
        }
        if self.tail == self.head {
            return Ok(None);
        }
        let offset = self.tail & (self.geometry.capacity - 1);
        let cap_len = self
            .region
            .load_u32(DATA_OFFSET + offset, Ordering::Relaxed);
        // One comparison for all that is rare: no bytes, a pad, more than a record may have.
        if cap_len.wrapping_sub(self.least) > self.span {
            return self.take_rare(offset, cap_len);
        }
        self.take_record(offset, cap_len)
    }

    #[inline(never)]
    fn take_copy(&mut self) -> Result<Option<Taken>, Corrupt> {
        // Room for one more stays, for who asks between two batches.
        self.stage(true)?;
        Ok(self.take_staged())
    }

    #[cold]
    fn take_rare(&mut self, mut offset: u64, mut cap_len: u32) -> Result<Option<Taken>, Corrupt> {
        if cap_len == PAD {
            let skip = self.geometry.capacity - offset;
            if skip >= self.head.wrapping_sub(self.tail) {
                return Err(self.corrupt(cap_len));
            }
            self.tail = self.tail.wrapping_add(skip);
            offset = 0;
            cap_len = self.region.load_u32(DATA_OFFSET, Ordering::Relaxed);
        }
        // The host frees the memory of a closed ring, which reads as zeroes then: its life says so
        // before.
        if cap_len == 0 && !self.is_beside && self.life() == Life::Closed {
            self.head = self.tail;
            return Ok(None);
        }
        let is_short = self.is_beside && cap_len < SHORTEST;
        if cap_len > self.geometry.snaplen || is_short {
            return Err(self.corrupt(cap_len));
        }
        self.take_record(offset, cap_len)
    }

    /// Takes the record at `offset`, whose bytes are no more than a record may have.
    #[inline(always)]
    fn take_record(&mut self, offset: u64, cap_len: u32) -> Result<Option<Taken>, Corrupt> {
        let size = record_size(cap_len);
        let available = self.head.wrapping_sub(self.tail);
        if size > available || size > self.geometry.capacity - offset {
            return Err(self.corrupt(cap_len));
        }
        self.tail = self.tail.wrapping_add(size);
        self.read = self.read.wrapping_add(1);
        self.fetch_ahead(AHEAD * size);
        Ok(Some(Taken {
            at: DATA_OFFSET + offset,
            cap_len,
        }))
    }

    /// Fetches the header and the first bytes of a record some records on, if all are of one size.
    ///
    /// NB: where a record starts is known only once the one before it was read, so without this
    /// guess each header costs one trip between the cores. Two processes: 60 bytes 25 → 79 Mpps
    /// (64 KiB ring), 123 → 140 (512 KiB); 1514 bytes 20 → 25. Never beyond `head`: a line fetched
    /// while the producer writes it costs both sides a trip.
    #[inline]
    fn fetch_ahead(&self, ahead: u64) {
        if ahead < self.head.wrapping_sub(self.tail) {
            let mask = self.geometry.capacity - 1;
            let at = DATA_OFFSET + (self.tail.wrapping_add(ahead) & mask);
            self.region.prefetch(at);
            self.region.prefetch(at + 64);
        }
    }

    #[inline]
    #[expect(
        unsafe_code,
        reason = "the one place where the reader lends ring memory"
    )]
    fn lend<'a>(&self, taken: Taken) -> Packet<'a> {
        let Taken { at, cap_len } = taken;
        let region = match &self.shared {
            None => &self.region,
            Some(shared) => &shared.copies,
        };
        let (_, mut meta) = read_meta(region, at);
        if self.is_beside {
            meta.flags &= self.flags;
            meta.lost = 0;
        }
        let skip = read_offload(region, at, cap_len, &mut meta);
        // NB: a member of a trust group can change what it sent while it is lent; the members trust each other
        // with that (see `direct`), and nobody decides by such bytes what memory to touch.
        // SAFETY: the host reuses a record only after `tail` passed it (ring contract, trusted
        // host). `release` and `arm`, which give `tail` away, take `&mut self` and so end every loan:
        // the two callers tie 'a to a borrow of the consumer. The copies of a group are private
        // memory, and overwritten only where no loan can be: see `take_staged`.
        let bytes = unsafe { region.lend(at + RECORD_HEADER + skip, u64::from(cap_len) - skip) };
        Packet { meta, bytes }
    }

    #[cold]
    fn corrupt(&mut self, cap_len: u32) -> Corrupt {
        let corrupt = Corrupt {
            at: self.tail,
            cap_len,
            available: self.head.wrapping_sub(self.tail),
        };
        if self.is_beside {
            (self.is_over, self.head) = (true, self.tail);
        }
        corrupt
    }
}

/// Packets published when the batch was begun; see [`Consumer::batch`] and [`Consumer::span`].
#[derive(Debug)]
pub struct Batch<'a> {
    consumer: &'a mut Consumer,
    left: usize,
    rest: Rest,
}

/// Where the packets of a batch may lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// Anywhere.
    Anywhere,
    /// After the one that comes next, wherever that is.
    BehindTheNext,
    /// After those taken.
    Behind,
}

impl<'a> Iterator for Batch<'a> {
    type Item = Result<Packet<'a>, Corrupt>;

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 || (self.rest == Rest::Behind && self.consumer.is_at_wrap()) {
            return None;
        }
        if self.rest == Rest::BehindTheNext {
            self.rest = Rest::Behind;
        }
        self.left -= 1;
        match self.consumer.take() {
            Ok(taken) => taken.map(|taken| Ok(self.consumer.lend(taken))),
            Err(corrupt) => {
                self.left = 0;
                Some(Err(corrupt))
            }
        }
    }
}

/// Bytes of the shortest frame of a member of a trust group: an Ethernet header.
const SHORTEST: u32 = 14;
/// How many records ahead of the one just taken lines are fetched.
const AHEAD: u64 = 8;
