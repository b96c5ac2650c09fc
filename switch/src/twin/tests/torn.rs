//! Entries that change while the kernel instance reads them.

use super::*;

/// Runs the kernel instance against a writer; how many frames went to a port where their station never was, how many
/// were forwarded, and how often the writer wrote. It takes this long, or, of a control, until one was wrong.
fn race(
    time: Duration,
    is_control: bool,
    write: impl Fn(&mut Both, &mut Random) + Sync,
) -> Option<(u64, u64, u64)> {
    let mut both = Both::new()?;
    both.table.learn(key(1_000_000), 1, now_s());
    let state = both.state.region().clone();
    let layout = both.layout;
    let frames: Vec<[u8; 64]> = (0..STATIONS).map(|it| frame(1_000_000, it)).collect();
    let over = AtomicBool::new(false);
    let writes = AtomicU64::new(0);
    let (mut wrong, mut forwarded) = (0, 0);
    let program = Arc::clone(&both.classifier);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut random = Random(88_172_645_463_325_252);
            while !over.load(Ordering::Relaxed) {
                write(&mut both, &mut random);
                writes.fetch_add(1, Ordering::Relaxed);
            }
        });
        let until = Instant::now() + time;
        let out =
            |number| state.load_u64(layout.port(number) + part::OUT_FRAMES, Ordering::Relaxed);
        while Instant::now() < until && !(is_control && wrong > 0) {
            for (station, frame) in (0..).zip(&frames) {
                let own = home(station);
                let before = [2, 4].map(out);
                program.test_repeatedly(frame, 64).unwrap();
                let after = [2, 4].map(out);
                let [two, four] = [0, 1].map(|at| after[at] - before[at]);
                forwarded += two + four;
                wrong += if own == 2 { four } else { two };
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    Some((wrong, forwarded, writes.into_inner()))
}

const STATIONS: u32 = 64;

/// The only port at which a station ever is.
fn home(station: u32) -> u16 {
    if station.is_multiple_of(2) { 2 } else { 4 }
}

#[test]
fn no_frame_goes_by_a_torn_entry_while_stations_come_and_go() {
    let learn = |both: &mut Both, random: &mut Random| {
        let (station, now) = (random.next() % STATIONS, now_s());
        match random.next() % 4 {
            0 => {
                // As if it had been heard long ago, and swept.
                both.table.unlearn(key(station));
            }
            _ => {
                let learned = both.table.learn(key(station), home(station), now);
                assert!(matches!(learned, Learned::New | Learned::Known));
            }
        }
    };
    let Some((wrong, forwarded, writes)) = race(Duration::from_secs(3), false, learn) else {
        return;
    };
    assert_eq!(wrong, 0, "of {forwarded}");
    println!("{writes} writes and {forwarded} frames in 3 s, 0 torn");
    assert!(
        forwarded > 100_000 && writes > 300_000,
        "{forwarded} {writes}"
    );
}

#[test]
fn a_writer_without_sequences_tears_entries() {
    let tear = |both: &mut Both, random: &mut Random| {
        let station = random.next() % STATIONS;
        both.table
            .tear(key(station), home(station), 6 - home(station));
    };
    let Some((wrong, forwarded, _)) = race(Duration::from_secs(60), true, tear) else {
        return;
    };
    assert!(wrong > 0, "the fault is none: {forwarded} frames");
}
