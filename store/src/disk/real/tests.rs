use std::os::unix::fs::MetadataExt;

use super::*;

#[test]
fn what_is_reserved_for_a_segment_at_work_is_not_given_back() {
    let name = format!("vnplug-trim-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let (mut writes, mut begins) = (Real::new(false).0, Real::new(false).0);
    writes.create(&path).unwrap();
    writes.allocate(0, 1 << 20).unwrap();
    let reserved = || std::fs::metadata(&path).unwrap().blocks() * 512;
    assert!(reserved() >= 1 << 20);
    begins.trim(&path).unwrap();
    assert!(reserved() >= 1 << 20);
    // The control: it was killed.
    drop(writes);
    begins.trim(&path).unwrap();
    assert!(reserved() < 1 << 20);
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_link_in_the_place_of_a_small_file_leads_nowhere() {
    let dir = std::env::temp_dir().join(format!("vnplug-link-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (victim, link) = (dir.join("victim"), dir.join("link"));
    std::fs::write(&victim, "untouched").unwrap();
    std::os::unix::fs::symlink(&victim, &link).unwrap();
    let mut disk = Real::new(false).0;
    let stored = disk.store(&link, b"x").unwrap_err().to_string();
    assert!(stored.contains("link: a symbolic link"), "{stored}");
    assert!(disk.append(&link, b"x").is_err());
    assert!(disk.lock(&link).is_err());
    assert_eq!(std::fs::read(&victim).unwrap(), b"untouched");
    // Where nothing is in the way.
    let file = dir.join("file");
    disk.store(&file, b"long").unwrap();
    disk.store(&file, b"x").unwrap();
    disk.append(&file, b"y").unwrap();
    assert_eq!(disk.load(&file).unwrap().unwrap(), b"xy");
    assert_eq!(disk.load(&dir.join("none")).unwrap(), None);
    std::fs::remove_dir_all(&dir).unwrap();
}

/// With io_uring: a disk with an open file, and one that is over when it is dropped.
struct TestDir(Real, PathBuf);

impl TestDir {
    fn new(what: &str) -> Self {
        let name = format!("vnplug-real-{}-{what}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut disk = Real::new(true).0;
        disk.create(&path).unwrap();
        Self(disk, path)
    }

    fn start(&mut self, number: u8, offset: u64) {
        let mut buffer = Buffer::new(BLOCK as usize, number.into());
        buffer.fill(number);
        let len = buffer.len();
        self.0.start(Write {
            buffer,
            len,
            offset,
        });
    }

    /// Begins what was started, and waits for the disk, not for what it has to say.
    fn pass(&mut self) {
        self.0.submit();
        let ring = self.0.ring.as_mut().expect("this test needs io_uring");
        assert!(ring.is_busy(), "this test needs O_DIRECT in {:?}", self.1);
        while !ring.is_done() {
            std::thread::yield_now();
        }
    }

    fn finished(&mut self) -> Vec<(u8, bool)> {
        let next = || self.0.finish();
        std::iter::from_fn(next)
            .map(|written| (written.write.buffer[0], written.result.is_ok()))
            .collect()
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.1);
    }
}

const BLOCK: u64 = crate::disk::BLOCK as u64;

#[test]
fn what_is_over_makes_room_for_the_next_and_is_told_in_turn() {
    let mut place = TestDir::new("turn");
    place.start(1, 0);
    place.pass();
    place.start(2, BLOCK);
    place.start(3, 2 * BLOCK);
    // The first is over: the others are begun though nobody asked for it yet.
    place.pass();
    place.start(4, 3 * BLOCK);
    assert_eq!(std::fs::metadata(&place.1).unwrap().len(), 3 * BLOCK);
    let all = [(1, true), (2, true), (3, true), (4, true)];
    assert_eq!(place.finished(), all);
    let written = std::fs::read(&place.1).unwrap();
    let firsts: Vec<u8> = written.iter().step_by(BLOCK as usize).copied().collect();
    assert_eq!(firsts, [1, 2, 3, 4]);
}

#[test]
fn behind_a_write_that_failed_nothing_is_begun() {
    let mut place = TestDir::new("failed");
    // No file is so long.
    place.start(1, 1 << 63);
    place.pass();
    place.start(2, 0);
    place.0.submit();
    assert!(!place.0.ring.as_ref().unwrap().is_busy());
    assert_eq!(place.finished(), [(1, false), (2, false)]);
    assert_eq!(std::fs::metadata(&place.1).unwrap().len(), 0);
    // The same where the one that failed is known, and is not the oldest.
    for number in [1, 2] {
        place.start(number, 0);
    }
    let ends = std::mem::take(&mut place.0.started).into_iter();
    let results = [Ok(()), Err(errno(Errno::IO))];
    let ends = ends
        .zip(results)
        .map(|(write, result)| Written { write, result });
    place.0.finished = ends.collect();
    assert!(place.0.finish().unwrap().result.is_ok());
    place.start(3, 0);
    place.0.submit();
    assert!(!place.0.ring.as_ref().unwrap().is_busy());
    assert_eq!(place.finished(), [(2, false), (3, false)]);
    assert_eq!(std::fs::metadata(&place.1).unwrap().len(), 0);
    // The control: then it is as ever.
    place.start(3, 0);
    assert_eq!(place.finished(), [(3, true)]);
    assert_eq!(std::fs::metadata(&place.1).unwrap().len(), BLOCK);
}
