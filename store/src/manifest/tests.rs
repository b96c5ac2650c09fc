use std::fs;

use super::*;
use crate::disk::Real;
use vnplug_testing::TestDir;

fn name(sequence: u64) -> String {
    format!("r-{sequence:010}-20261121T13450{sequence}.000000000Z.pcapng")
}

/// A recording of these segments, all of them closed.
fn recording(what: &str, numbers: std::ops::Range<u64>) -> (TestDir, Manifest) {
    let place = TestDir::new(what);
    let manifest = Manifest::open(&place.0, "r").unwrap();
    for number in numbers {
        add(&place, &manifest, number);
    }
    (place, manifest)
}

fn add(place: &TestDir, manifest: &Manifest, number: u64) {
    fs::write(place.0.join(name(number)), vec![number as u8; 10_000]).unwrap();
    let mut disk = Real::new(false).0;
    manifest
        .take_in(&mut disk, &name(number), &mut || true)
        .unwrap();
}

fn found(place: &TestDir, head: Option<&str>) -> Verification {
    let mut all = verify(&place.0, head, &mut |_| {}).unwrap();
    assert_eq!(all.len(), 1);
    all.remove(0)
}

fn told(place: &TestDir) -> String {
    let holes = holes(std::slice::from_ref(&place.0)).unwrap();
    holes.iter().map(Hole::to_string).collect()
}

#[test]
fn what_was_closed_is_known_and_nothing_else_passes() {
    let (place, manifest) = recording("manifest-same", 1..5);
    let result = found(&place, None);
    assert!(!result.is_wrong(), "{result:?}");
    assert_eq!((result.lines, result.bytes), (5, 40_000));
    let abc = place
        .0
        .join("r-0000000005-20261121T134509.000000000Z.pcapng");
    fs::write(&abc, "abc").unwrap();
    manifest
        .take_in(
            &mut Real::new(false).0,
            abc.file_name().unwrap().to_str().unwrap(),
            &mut || true,
        )
        .unwrap();
    let book = Book::read(&place.0, "r").unwrap();
    // As sha256sum says.
    let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert!(book.files.values().any(|content| content.sha256 == known));
    // One bit in the middle of one of them.
    let path = place.0.join(name(2));
    let mut bytes = fs::read(&path).unwrap();
    bytes[5000] ^= 1;
    fs::write(&path, bytes).unwrap();
    assert_eq!(told(&place), "");
    let result = found(&place, None);
    let changed: Vec<&str> = result
        .files
        .iter()
        .filter(|(_, verdict)| matches!(verdict, Verdict::Changed(_)))
        .map(|(file, _)| file.as_str())
        .collect();
    assert!(result.is_wrong());
    assert_eq!(changed, [name(2)]);
}

#[test]
fn a_missing_segment_is_a_hole_and_a_removed_one_is_none() {
    let (place, manifest) = recording("manifest-hole", 1..7);
    // The oldest, on purpose.
    manifest.removing(&name(1), "quota").unwrap();
    fs::remove_file(place.0.join(name(1))).unwrap();
    assert_eq!(told(&place), "");
    assert!(!found(&place, None).is_wrong());
    fs::remove_file(place.0.join(name(3))).unwrap();
    let words = format!("sequence 3 is missing between {} and {}", name(2), name(4));
    assert!(told(&place).ends_with(&words), "{}", told(&place));
    let result = found(&place, None);
    assert!(result.is_wrong());
    assert!(result.files.contains(&(name(3), Verdict::Missing)));
    assert!(
        result
            .files
            .contains(&(name(1), Verdict::Removed("quota".into())))
    );
    // The newest, and one of another length.
    fs::remove_file(place.0.join(name(6))).unwrap();
    fs::write(place.0.join(name(4)), "other").unwrap();
    let told = told(&place);
    assert!(told.contains("sequence 6 is missing after "), "{told}");
    assert!(
        told.contains("is not the file that was closed: it has 5 bytes"),
        "{told}"
    );
}

#[test]
fn a_recording_without_a_manifest_has_its_numbers() {
    let (place, _) = recording("manifest-none", 1..6);
    fs::remove_file(place.0.join("r.manifest")).unwrap();
    assert_eq!(told(&place), "");
    fs::remove_file(place.0.join(name(2))).unwrap();
    fs::remove_file(place.0.join(name(3))).unwrap();
    assert!(told(&place).contains("2 segments are missing (sequence 2 to 3) between "));
    assert!(found(&place, None).is_wrong());
    // It was never used.
    let manifest = Manifest::open(&place.0, "r").unwrap();
    manifest.unused(2).unwrap();
    manifest.unused(3).unwrap();
    assert_eq!(told(&place), "");
}

#[test]
fn no_line_is_changed_left_out_or_cut_off_unseen() {
    let (place, _) = recording("manifest-chain", 1..5);
    let path = place.0.join("r.manifest");
    let whole = fs::read_to_string(&path).unwrap();
    let head = Book::parse(whole.as_bytes()).head;
    assert!(!found(&place, Some(&head)).is_wrong());
    let lines: Vec<&str> = whole.lines().collect();
    for line in 0..lines.len() {
        let mut without = lines.clone();
        without.remove(line);
        let is_last = line == lines.len() - 1;
        fs::write(&path, without.join("\n") + "\n").unwrap();
        // Only who noted the last line sees that it is gone.
        assert_ne!(found(&place, None).chain.is_empty(), !is_last, "{line}");
        assert!(!found(&place, Some(&head)).chain.is_empty(), "{line}");
        let mut changed: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        changed[line] = changed[line].replace("2026", "2027");
        fs::write(&path, changed.join("\n") + "\n").unwrap();
        assert!(found(&place, Some(&head)).is_wrong(), "{line}");
    }
}

/// A kill, or a full disk, within a line.
#[test]
fn a_line_that_was_not_finished_is_written_anew() {
    let (place, manifest) = recording("manifest-torn", 1..4);
    drop(manifest);
    let path = place.0.join("r.manifest");
    let whole = fs::read(&path).unwrap();
    let last = whole[..whole.len() - 1]
        .iter()
        .rposition(|&byte| byte == b'\n')
        .unwrap()
        + 1;
    for len in last..whole.len() {
        fs::write(&path, &whole[..len]).unwrap();
        let result = found(&place, None);
        assert!(!result.is_wrong(), "{result:?}");
        assert!(result.files.contains(&(name(3), Verdict::Unlisted)));
        let manifest = Manifest::open(&place.0, "r").unwrap();
        assert!(manifest.has(&name(2)) && !manifest.has(&name(3)));
        add(&place, &manifest, 3);
        let result = found(&place, None);
        assert!(!result.is_wrong(), "{result:?}");
        assert!(result.files.contains(&(name(3), Verdict::Same)));
    }
}

/// The cost of a hash, read back from the disk: `cargo test --release -- --ignored --nocapture cost_of_a_hash`.
#[test]
#[ignore = "a measurement"]
fn cost_of_a_hash() {
    let (place, manifest) = recording("manifest-cost", 0..0);
    fs::write(place.0.join(name(1)), vec![7; 1 << 30]).unwrap();
    File::open(place.0.join(name(1)))
        .unwrap()
        .sync_all()
        .unwrap();
    let cpu = || {
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        used.tv_sec as f64 + used.tv_nsec as f64 / 1e9
    };
    let (began, before) = (std::time::Instant::now(), cpu());
    manifest
        .take_in(&mut Real::new(false).0, &name(1), &mut || true)
        .unwrap();
    eprintln!(
        "1 GiB: {:.2} s of CPU, {:?}",
        cpu() - before,
        began.elapsed()
    );
}
