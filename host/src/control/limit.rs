//! A bound on how fast one owner is served: a user or a VM, on however many connections.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::hub::Peer;

/// Requests per second of one owner, and at once; of an operator, of each connection.
const RATE: (f64, f64) = (2_000.0, 4_000.0);
/// What a new connection costs.
const CONNECT: f64 = 4.0;
/// What each MiB costs that the daemon commits: half a millisecond, so that who asks for nothing but
/// memory has a fifth of a thread.
const MIB: f64 = 5.0;
/// Descriptors that were sent to one owner and not read. The kernel counts them all for the daemon's user, and
/// refuses to send more than the limit of open files; each owner has a small share of that.
const UNREAD_FDS: usize = 256;
/// Buckets of owners without a connection are looked through when there are more.
const MANY: usize = 1_024;

/// The bucket of an owner, on each of its connections.
pub(crate) type SharedBucket = Rc<RefCell<Bucket>>;

/// The buckets of those who are no operators.
#[derive(Debug, Default)]
pub(crate) struct Buckets(HashMap<Peer, SharedBucket>);

impl Buckets {
    /// The bucket for a new connection: an operator's own, or that of all connections of its owner,
    /// which pays for it.
    pub(crate) fn of(&mut self, viewer: &Peer, is_operator: bool, now: Instant) -> SharedBucket {
        let full = || Rc::new(RefCell::new(Bucket::new(RATE.0, RATE.1, now)));
        if is_operator {
            return full();
        }
        if self.0.len() > MANY {
            // A full one is as good as a new one.
            self.0
                .retain(|_, it| Rc::strong_count(it) > 1 || !it.borrow_mut().is_full(now));
        }
        let bucket = self.0.entry(viewer.clone()).or_insert_with(full);
        bucket.borrow_mut().charge(CONNECT);
        Rc::clone(bucket)
    }
}

/// A token bucket: `rate` requests per second, `burst` at once.
#[derive(Debug)]
pub(crate) struct Bucket {
    rate: f64,
    burst: f64,
    tokens: f64,
    last: Instant,
    /// Connections that wait for a token.
    line: u32,
    /// Descriptors that were sent and not read.
    unread_fds: usize,
}

impl Bucket {
    /// A full bucket.
    pub(crate) fn new(rate: f64, burst: f64, now: Instant) -> Self {
        Self {
            rate,
            burst,
            tokens: burst,
            last: now,
            line: 0,
            unread_fds: 0,
        }
    }

    /// How long until there is a token for one more that waits; `None`: there is one now.
    pub(crate) fn wait(&mut self, now: Instant) -> Option<Duration> {
        self.fill(now);
        let missing = 1.0 - self.tokens + f64::from(self.line);
        (self.tokens < 1.0).then(|| Duration::from_secs_f64(missing / self.rate))
    }

    /// A connection begins to wait for its token, or has waited. Each waits for one of its own: if all
    /// came back for the same token, that would be work without end.
    pub(crate) fn line_up(&mut self, waits: bool) {
        self.line = match waits {
            true => self.line + 1,
            false => self.line.saturating_sub(1),
        };
    }

    /// Whether `fds` descriptors may be sent now.
    pub(crate) fn may_send(&self, fds: usize) -> bool {
        self.unread_fds == 0 || self.unread_fds + fds <= UNREAD_FDS
    }

    /// `fds` of them were sent.
    pub(crate) fn sent(&mut self, fds: usize) {
        self.unread_fds += fds;
    }

    /// `fds` of them were read.
    pub(crate) fn were_read(&mut self, fds: usize) {
        self.unread_fds -= fds;
    }

    fn is_full(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.tokens >= self.burst && self.unread_fds == 0
    }

    fn fill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.last).as_secs_f64();
        self.last = now;
        self.tokens = (self.tokens + passed * self.rate).min(self.burst);
    }

    /// Takes tokens for memory that is committed.
    pub(crate) fn charge_bytes(&mut self, bytes: u64) {
        self.charge(bytes as f64 / f64::from(1 << 20) * MIB);
    }

    /// Gives them back: another pays.
    pub(crate) fn give_back_bytes(&mut self, bytes: u64) {
        self.tokens += bytes as f64 / f64::from(1 << 20) * MIB;
    }

    /// Takes tokens, into debt if need be: 1 for a request, more for one that was costly.
    pub(crate) fn charge(&mut self, tokens: f64) {
        self.tokens -= tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_passes_and_then_the_rate_holds() {
        let start = Instant::now();
        let mut bucket = Bucket::new(10.0, 3.0, start);
        for _ in 0..3 {
            assert_eq!(bucket.wait(start), None);
            bucket.charge(1.0);
        }
        let wait = bucket.wait(start).unwrap();
        assert!(wait <= Duration::from_millis(100));
        let later = start + wait + Duration::from_millis(1);
        assert_eq!(bucket.wait(later), None);
        bucket.charge(11.0);
        assert!(bucket.wait(start + Duration::from_millis(500)).is_some());
        assert_eq!(bucket.wait(start + Duration::from_secs(5)), None);
    }

    #[test]
    fn an_owner_that_reads_no_descriptors_is_sent_a_few() {
        let now = Instant::now();
        let mut buckets = Buckets::default();
        let bucket = buckets.of(&Peer::User(1000), false, now);
        while bucket.borrow().may_send(3) {
            bucket.borrow_mut().sent(3);
        }
        let other = buckets.of(&Peer::User(1000), false, now);
        assert!(!other.borrow().may_send(3) && other.borrow().unread_fds <= UNREAD_FDS);
        assert!(!other.borrow_mut().is_full(now + Duration::from_secs(9)));
        other.borrow_mut().were_read(3);
        assert!(bucket.borrow().may_send(3));
    }

    #[test]
    fn another_connection_of_an_owner_is_no_other_bucket() {
        let now = Instant::now();
        let mut buckets = Buckets::default();
        let (user, other) = (Peer::User(1000), Peer::User(1001));
        let first = buckets.of(&user, false, now);
        first.borrow_mut().charge(2.0 * RATE.1);
        drop(first);
        let again = buckets.of(&user, false, now);
        assert!(again.borrow_mut().wait(now) > Some(Duration::from_secs(1)));
        assert_eq!(buckets.of(&other, false, now).borrow_mut().wait(now), None);
        // Each connection that waits has a token of its own to wait for.
        let first = again.borrow_mut().wait(now).unwrap();
        again.borrow_mut().line_up(true);
        let second = again.borrow_mut().wait(now).unwrap();
        assert!(
            second > first + Duration::from_micros(400),
            "{first:?} {second:?}"
        );
        // An operator's connections are on their own, and cost nothing.
        buckets.of(&user, true, now).borrow_mut().charge(RATE.1);
        assert_eq!(buckets.of(&user, true, now).borrow_mut().wait(now), None);
    }

    #[test]
    fn connections_that_come_and_go_are_bounded_too() {
        let now = Instant::now();
        let mut buckets = Buckets::default();
        let user = Peer::User(1000);
        let waits = |buckets: &mut Buckets| {
            let bucket = buckets.of(&user, false, now);
            bucket.borrow_mut().wait(now).is_some()
        };
        let connected = (0..10_000).take_while(|_| !waits(&mut buckets)).count();
        assert!((900..=1_000).contains(&connected), "{connected}");
    }

    #[test]
    fn buckets_of_owners_that_are_gone_are_forgotten() {
        let now = Instant::now();
        let mut buckets = Buckets::default();
        for uid in 0..5_000 {
            buckets.of(&Peer::User(uid), false, now);
        }
        assert_eq!(buckets.0.len(), 5_000);
        let later = now + Duration::from_secs(1);
        buckets.of(&Peer::User(0), false, later);
        assert_eq!(buckets.0.len(), 1);
    }
}
