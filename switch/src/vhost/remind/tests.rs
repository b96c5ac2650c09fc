//! The reminder without its thread: the tests say what time it is.

use std::io::Read;
use std::os::unix::net::UnixStream;

use rustix::event::{EventfdFlags, eventfd};
use vnplug_os::closer::PeerFd;
use vnplug_testing::eventually;

use super::super::call::Calls;
use super::*;

/// Long after everything.
const FAR: u64 = u64::MAX >> (BITS + 1);

/// A reminder that nobody runs, a call that has a place there, and the guest's end.
struct Site {
    shared: Arc<Shared>,
    call: Arc<Call>,
    theirs: UnixStream,
    late: Vec<Late>,
}

impl Site {
    fn new() -> Self {
        let shared = Arc::<Shared>::default();
        let (call, theirs) = one(&shared, None);
        theirs.set_nonblocking(true).unwrap();
        Self {
            shared,
            call,
            theirs,
            late: Vec::new(),
        }
    }

    /// When the call was made that is noted.
    fn noted_us(&self) -> u64 {
        let tables = self.shared.tables();
        tables.trusted.entries[0].note.0.load(Ordering::Relaxed) >> BITS
    }

    fn look(&mut self, now_us: u64) -> Option<u64> {
        self.shared.look(now_us, &mut self.late)
    }

    /// How many calls the guest reads now.
    fn reads(&mut self) -> usize {
        let mut bytes = Vec::new();
        let _ = self.theirs.read_to_end(&mut bytes);
        assert_eq!(bytes.len() % 8, 0);
        bytes.len() / 8
    }

    fn made(&self) -> u64 {
        self.shared.made.load(Ordering::Relaxed)
    }
}

fn one(shared: &Arc<Shared>, caller: Option<&Caller>) -> (Arc<Call>, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    // Room for some hundred calls, whatever the machine's default is.
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 64 << 10).unwrap();
    let fd = PeerFd::alone(ours.into());
    let call = Arc::new_cyclic(|call| {
        let mark = shared.mark(Weak::clone(call), caller);
        Call::new(fd, true, caller.cloned(), mark)
    });
    (call, theirs)
}

/// Bytes that the guest has not read.
fn socket_len(theirs: &UnixStream) -> u64 {
    rustix::io::ioctl_fionread(theirs).unwrap()
}

#[test]
fn a_call_that_is_read_is_made_once() {
    let mut site = Site::new();
    site.call.ring(&Calls::default());
    let begin = site.noted_us();
    assert_eq!(site.reads(), 1);
    // Nothing is done before it is time, and then nothing is left to do.
    assert_eq!(site.look(begin + AFTER_US - 1), Some(1));
    assert_eq!(site.look(begin + AFTER_US), None);
    assert_eq!((site.reads(), site.made()), (0, 0));
}

#[test]
fn a_call_that_is_not_read_is_made_three_times_more_and_no_more() {
    let mut site = Site::new();
    site.call.ring(&Calls::default());
    let mut now = site.noted_us();
    for _ in 0..3 {
        assert_eq!(site.look(now + AFTER_US - 1), Some(1));
        now += AFTER_US;
        assert_eq!(site.look(now), Some(AFTER_US));
    }
    for _ in 0..10 {
        now += AFTER_US;
        assert_eq!(site.look(now), None);
    }
    assert_eq!((site.reads(), site.made()), (4, 3));
    // The next one has its own.
    site.call.ring(&Calls::default());
    let begin = site.noted_us();
    assert_eq!(site.look(begin + AFTER_US), Some(AFTER_US));
    assert_eq!(site.reads(), 2);
    assert_eq!(site.look(begin + 2 * AFTER_US), None);
    assert_eq!((site.reads(), site.made()), (0, 4));
}

#[test]
fn a_call_that_is_made_anew_begins_again() {
    let mut site = Site::new();
    site.call.ring(&Calls::default());
    let first = site.noted_us();
    std::thread::sleep(Duration::from_micros(10));
    site.call.ring(&Calls::default());
    let second = site.noted_us();
    assert!(second > first);
    let left = second - first;
    assert_eq!(site.look(first + AFTER_US), Some(left));
    assert_eq!((site.reads(), site.made()), (2, 0));
}

#[test]
fn nobody_calls_again_who_is_gone() {
    let mut site = Site::new();
    site.call.ring(&Calls::default());
    let begin = site.noted_us();
    let (_, theirs) = UnixStream::pair().unwrap();
    drop(std::mem::replace(&mut site.theirs, theirs));
    // What it left unread is gone with it.
    assert_eq!(site.look(begin + AFTER_US), None);
    site.call.ring(&Calls::default());
    assert_eq!(site.look(FAR), None);
    assert_eq!(site.made(), 0);
}

#[test]
fn a_socket_that_is_full_stops_nobody_and_is_let_alone_after_three_times() {
    let mut site = Site::new();
    let mut rung = 0;
    // Longer than a socket has room for.
    while rung < 10_000 {
        site.call.ring(&Calls::default());
        rung += 1;
    }
    let mut now = site.noted_us();
    for _ in 0..3 {
        now += AFTER_US;
        assert_eq!(site.look(now), Some(AFTER_US));
    }
    assert_eq!(site.look(now + AFTER_US), None);
    let read = site.reads();
    assert!(read > 8 && read < rung, "{read}");
    // None of them was made.
    assert_eq!(site.made(), 0);
}

#[test]
fn a_place_goes_with_its_call() {
    let site = Site::new();
    let (other, _theirs) = one(&site.shared, None);
    let places = || site.shared.tables().trusted.entries.len();
    assert_eq!(places(), 2);
    drop(other);
    assert_eq!(places(), 1);
    drop(site.call);
    assert!(site.shared.tables().trusted.entries.is_empty());
}

#[test]
fn a_stranger_has_its_part_of_the_table_and_who_finds_no_place_is_called_once() {
    let shared = Arc::<Shared>::default();
    let [hostile, honest] = [(); 2].map(|()| Caller::default());
    let place = |caller: Option<&Caller>| shared.mark(Weak::new(), caller);
    let mut all: Vec<_> = (0..2 * OF_ONE)
        .filter_map(|_| place(Some(&hostile)))
        .collect();
    assert_eq!(all.len(), OF_ONE);
    assert!(place(Some(&honest)).is_some());
    // However many strangers there are, nobody who is trusted does without a place.
    let others: Vec<_> = (0..2 * MOST).map(|_| Caller::default()).collect();
    all.extend(others.iter().filter_map(|it| place(Some(it))));
    assert_eq!(all.len(), MOST);
    all.extend((0..2 * MOST).filter_map(|_| place(None)));
    assert_eq!(all.len(), 2 * MOST);
    let (call, theirs) = one(&shared, None);
    assert!(shared.tables().trusted.entries.len() == MOST);
    call.ring(&Calls::default());
    assert_eq!(shared.look(FAR, &mut Vec::new()), None);
    theirs.set_nonblocking(true).unwrap();
    let mut bytes = [0; 16];
    assert_eq!((&theirs).read(&mut bytes).unwrap(), 8);
}

#[test]
fn one_look_makes_few_calls_and_the_next_one_makes_the_others() {
    let shared = Arc::<Shared>::default();
    let all: Vec<_> = (0..3 * AT_ONCE).map(|_| one(&shared, None)).collect();
    for (call, _) in &all {
        call.ring(&Calls::default());
    }
    let (mut late, mut now, mut made) = (Vec::new(), FAR, 0);
    let mut looks = 0;
    while let Some(within) = shared.look(now, &mut late) {
        looks += 1;
        assert!(looks < 100 && within >= PAUSE_US, "{looks}, {within}");
        let before = made;
        made = shared.made.load(Ordering::Relaxed);
        assert!(made - before <= AT_ONCE as u64);
        if looks == 3 {
            // Each one had its turn before any had a second.
            let reads = |theirs: &UnixStream| socket_len(theirs) == 16;
            assert!(all.iter().all(|(_, theirs)| reads(theirs)));
        }
        now += within;
    }
    assert_eq!(made, 9 * AT_ONCE as u64);
    assert_eq!(shared.look(now, &mut late), None);
}

#[test]
fn calls_of_strangers_take_no_turn_of_those_of_others() {
    let shared = Arc::<Shared>::default();
    let hostile = Caller::default();
    let all: Vec<_> = (0..OF_ONE).map(|_| one(&shared, Some(&hostile))).collect();
    for (call, theirs) in &all {
        call.ring(&Calls::default());
        eventually("it is called", || socket_len(theirs) == 8);
    }
    let (call, theirs) = one(&shared, None);
    call.ring(&Calls::default());
    assert!(shared.look(FAR, &mut Vec::new()).is_some());
    assert_eq!(socket_len(&theirs), 16);
}

#[test]
fn a_caller_that_hangs_has_nobody_look_for_long() {
    let shared = Arc::<Shared>::default();
    let caller = Caller::default();
    let (call, theirs) = one(&shared, Some(&caller));
    let noted = || {
        shared.tables().strangers.entries[0]
            .note
            .0
            .load(Ordering::Relaxed)
    };
    call.ring(&Calls::default());
    eventually("it is noted", || noted() != 0);
    // A full eventfd that blocks.
    let full = eventfd(0, EventfdFlags::empty()).unwrap();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let at_full = full.try_clone().unwrap();
    let stuck = Call::new(PeerFd::alone(full), false, Some(caller.clone()), None);
    Arc::new(stuck).ring(&Calls::default());
    eventually("it is stuck", || caller.is_stuck());
    let (mut late, mut now, mut looks) = (Vec::new(), FAR, 0);
    while let Some(within) = shared.look(now, &mut late) {
        now += within;
        looks += 1;
        assert!(looks <= 3);
    }
    assert_eq!(looks, 3);
    // What was not made is not counted. One waits.
    let made = || shared.made.load(Ordering::Relaxed);
    assert_eq!((made(), socket_len(&theirs)), (0, 8));
    rustix::io::read(&at_full, &mut [0; 8]).unwrap();
    eventually("it is made", || made() == 1);
    assert_eq!(socket_len(&theirs), 16);
    assert_eq!(shared.look(now, &mut late), None);
}

#[test]
fn the_thread_sleeps_is_woken_by_a_call_and_ends_with_its_owner() {
    let made = Arc::<AtomicU64>::default();
    let calls = Calls::counting(Arc::clone(&made));
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let call = calls.add(PeerFd::alone(ours.into()), None).unwrap();
    let shared = Arc::clone(&call.mark().unwrap().shared);
    for _ in 0..3 {
        eventually("it sleeps", || shared.is_asleep.load(Ordering::Relaxed));
        let before = made.load(Ordering::Relaxed);
        call.ring(&calls);
        eventually("it calls again", || {
            made.load(Ordering::Relaxed) == before + 3
        });
        let mut bytes = [0; 32];
        theirs.read_exact(&mut bytes).unwrap();
    }
    drop(calls);
    drop(call);
    // The test's own is the last.
    eventually("the thread is gone", || Arc::strong_count(&shared) == 1);
}

#[test]
fn a_strangers_call_is_made_again_by_its_own_thread() {
    let made = Arc::<AtomicU64>::default();
    let calls = Calls::counting(Arc::clone(&made));
    let caller = Caller::default();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let call = calls.add(PeerFd::alone(ours.into()), Some(caller));
    let call = call.unwrap();
    call.ring(&calls);
    eventually("it is called again", || made.load(Ordering::Relaxed) == 3);
    let mut bytes = [0; 32];
    theirs.read_exact(&mut bytes).unwrap();
}
