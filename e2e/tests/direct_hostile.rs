//! A member of a trust group against the others. Alone in its process, whose mappings it looks at.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_ring::direct::home_size;
use vnplug_testing::eventually;

#[path = "direct/members.rs"]
mod members;
use members::{become_direct, frame, open, take};

/// Mappings of homes in this process: where they begin and end, and whether they are writable.
fn homes() -> Vec<(String, u64, bool)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let lines = maps
        .lines()
        .filter(|line| line.contains("memfd:vnplug-direct"));
    lines
        .map(|line| {
            let (range, rest) = line.split_once(' ').unwrap();
            let start = u64::from_str_radix(range.split_once('-').unwrap().0, 16).unwrap();
            (range.to_owned(), start, rest.starts_with("rw"))
        })
        .collect()
}

#[test]
fn nobody_can_write_what_another_sends_and_who_scribbles_harms_nobody() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--switch", "lan0"]).unwrap();
    let mut one = open(&daemon);
    let own = homes();
    assert_eq!(own.len(), 1);
    let [mut two, mut three] = [(); 2].map(|()| open(&daemon));
    become_direct(&daemon, (1, &mut one), (2, &mut two));
    become_direct(&daemon, (2, &mut two), (3, &mut three));
    become_direct(&daemon, (1, &mut one), (3, &mut three));
    let all = homes();
    let foreign: Vec<_> = all.iter().filter(|(.., writable)| !writable).collect();
    assert!(
        all.len() - foreign.len() == 3 && foreign.len() >= 6,
        "{all:?}"
    );
    for (range, ..) in foreign {
        // Not even as root, and by no way: the file of the mapping is the member's home.
        let path = format!("/proc/self/map_files/{range}");
        let home = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap();
        assert!(home.metadata().unwrap().len() >= home_size(1 << 18));
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(fallocate(&home, punch, 0, 4096), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&home, 0), Err(Errno::PERM));
        let write = home.write_at(&[1], 0).unwrap_err();
        assert_eq!(write.raw_os_error(), Some(Errno::PERM.raw_os_error()));
        assert!(
            vnplug::map_memory(home.as_fd(), 4096).is_err(),
            "it was mapped writable"
        );
    }
    // The first scribbles over all of its own home: words and rings.
    let memory = OpenOptions::new()
        .write(true)
        .open("/proc/self/mem")
        .unwrap();
    let noise: Vec<u8> = (0..=255).cycle().take(64 << 10).collect();
    for page in (0..home_size(1 << 20)).step_by(noise.len()) {
        let left = (home_size(1 << 20) - page).min(noise.len() as u64) as usize;
        memory.write_at(&noise[..left], own[0].1 + page).unwrap();
    }
    let begin = Instant::now();
    for number in 0..1000 {
        assert!(two.send(&frame(3, 2, number)).unwrap());
        let _ = two.send(&frame(1, 2, number)).unwrap();
        let _ = three.send(&frame(1, 3, number)).unwrap();
    }
    let mut came = Vec::new();
    eventually("the others go on", || {
        came.extend(take(&mut three));
        came.len() >= 1000
    });
    assert!(came.into_iter().eq(0..1000));
    assert!(begin.elapsed() < Duration::from_secs(5));
    let _ = take(&mut two);
    daemon.audit();
}
