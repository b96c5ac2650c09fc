//! Contexts of 1 to 32 guests at once, which Menon's tables leave out: what all send together, and how equal their parts are.

use std::thread::{ScopedJoinHandle, scope};
use std::time::{Duration, Instant};

use vnplug_e2e::Job;
use vnplug_e2e::daemon::value;
use vnplug_ring::counters::label;

use super::contexts::{LEN, LIMIT, PEER, SETTLED, Site, mbps, sender};
use crate::context::jain;
use crate::row::{Figure, Plan, Result, Samples};

/// How many guests send.
const GUESTS: [usize; 6] = [1, 2, 4, 8, 16, 32];

impl Site {
    /// Frames that each of the first guests has sent, by its context or by its card.
    fn sent(&self, side: usize, guests: usize) -> Result<Vec<u64>> {
        if side == 0 {
            let all = self.daemon.counters();
            let of = |nth: usize| {
                let owner = format!("vm bench{nth}");
                let ports = all
                    .iter()
                    .filter(|it| it.kind == "port" && label(it, "owner") == owner);
                ports.map(|it| value(it, "sent")).sum()
            };
            return Ok((0..guests).map(of).collect());
        }
        let text = self
            .here
            .enter(|| std::fs::read_to_string("/proc/thread-self/net/dev"))??;
        let of = |nth: usize| -> Result<u64> {
            let card = format!("tap{nth}:");
            let line = text
                .lines()
                .find_map(|line| line.trim().strip_prefix(&card));
            let packets = line.and_then(|it| it.split_whitespace().nth(1));
            Ok(packets.ok_or("no such card")?.parse()?)
        };
        (0..guests).map(of).collect()
    }

    /// The first guests send flat out: megabits a second together, and Jain's index of their parts.
    fn all_send(&self, side: usize, guests: usize, time: Duration) -> Result<(f64, f64)> {
        let before = self.sent(side, guests)?;
        let spawn = |it: &crate::uml::AttachedUml| it.guest().spawn(&sender(side, 0));
        let jobs = self.guests[..guests].iter().map(spawn);
        let jobs: Vec<_> = jobs.collect::<std::result::Result<_, _>>()?;
        let begun = Instant::now();
        let is_settled = |sent: &[u64]| {
            sent.iter()
                .zip(&before)
                .all(|(now, then)| *now > then + SETTLED)
        };
        while !is_settled(&self.sent(side, guests)?) {
            if begun.elapsed() > LIMIT || jobs.iter().any(Job::is_done) {
                let way = ["rings", PEER][side];
                // What one that has ended said is only in its answer.
                let ended: Vec<_> = jobs
                    .into_iter()
                    .filter(Job::is_done)
                    .map(|job| job.wait(LIMIT))
                    .collect();
                return Err(format!(
                    "{guests} guests do not all send by {way}; ended are {ended:?}"
                )
                .into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let first = self.sent(side, guests)?;
        let begun = Instant::now();
        std::thread::sleep(time);
        let last = self.sent(side, guests)?;
        let parts: Vec<_> = last
            .iter()
            .zip(&first)
            .map(|(last, first)| last - first)
            .collect();
        let total = mbps(parts.iter().sum(), begun.elapsed());
        end_all(&jobs)?;
        let parts: Vec<_> = parts.into_iter().map(|it| it as f64).collect();
        Ok((total, jain(&parts)))
    }
}

/// All at once: who is ended while the others still send has little of the processors to end with.
fn end_all(jobs: &[Job]) -> Result<()> {
    let end = |job: &Job| job.signal("TERM").and_then(|()| job.wait(LIMIT));
    let ended: Vec<_> = scope(|scope| {
        let threads: Vec<_> = jobs
            .iter()
            .map(|job| scope.spawn(move || end(job)))
            .collect();
        threads.into_iter().map(ScopedJoinHandle::join).collect()
    });
    for job in ended {
        job.map_err(|_| "a thread that ends a guest's sender panicked")??;
    }
    Ok(())
}

/// Ours and the guests' own cards in turns.
pub(crate) fn crowd(plan: &Plan) -> Result<Vec<Figure>> {
    let site = Site::new(GUESTS[GUESTS.len() - 1])?;
    let mut told = GUESTS.map(|_| [(); 4].map(|()| Samples::default()));
    for round in 1..=plan.rounds {
        for (guests, [rate, fair, their_rate, their_fair]) in GUESTS.into_iter().zip(&mut told) {
            let ours = site.all_send(0, guests, plan.time)?;
            let theirs = site.all_send(1, guests, plan.time)?;
            eprintln!(
                "  round {round}, {guests} guests: {:.0} Mb/s, Jain {:.4}; {PEER}: {:.0}, {:.4}",
                ours.0, ours.1, theirs.0, theirs.1
            );
            rate.push(ours.0);
            fair.push(ours.1);
            their_rate.push(theirs.0);
            their_fair.push(theirs.1);
        }
    }
    let mut figures = Vec::new();
    for (guests, [rate, fair, their_rate, their_fair]) in GUESTS.into_iter().zip(told) {
        for (end, unit, ours, peer) in [
            ("", "Mb/s", rate, their_rate),
            ("-fair", "Jain", fair, their_fair),
        ] {
            figures.push(Figure {
                name: format!("context-guests-{guests}{end}"),
                unit,
                ours,
                peer: Some((PEER.to_owned(), peer)),
                limit: None,
                note: format!(
                    "frames of {LEN} bytes that programs in {guests} of 32 guests of User-mode Linux send at once, flat out; ours by \
                     the rings of a port each, all on one veth, the peer by a packet socket on the vector driver's TAP each, all \
                     on one Linux bridge with a veth. -fair: Jain's index of what each had sent"
                ),
            });
        }
    }
    Ok(figures)
}
