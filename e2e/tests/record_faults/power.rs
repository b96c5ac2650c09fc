//! The power goes.

use std::fs;
use std::path::Path;

use vnplug_e2e::{DiskFault, Lab, LoggedDisk, WriteLog};

use crate::stage::{DIR, Stage, end, host, numbers, prefix};

#[test]
fn after_a_power_cut_everything_up_to_the_durable_mark_is_there() {
    let stage = Stage::new(true);
    let disk = DiskFault::new(&stage.guest, DIR).unwrap();
    disk.mount().unwrap();
    let (_daemon, recorder) = stage.start();
    let promised = stage.await_mark(6000, &recorder);
    disk.cut("killall -9 vnplug").unwrap();
    let (numbers, _) = stage.recorded();
    let prefix = prefix(&numbers);
    assert!(prefix >= promised, "{prefix} of {promised}");
    drop(recorder);
}

/// What a disk holds of a recording, read without its guest: e2fsck replays the journal, debugfs copies.
fn survives(image: &Path, out: &Path) -> u64 {
    let copy = out.with_extension("img");
    fs::copy(image, &copy).unwrap();
    let _ = fs::remove_dir_all(out);
    fs::create_dir(out).unwrap();
    let [copy, rdump] = [
        copy.display().to_string(),
        format!("rdump /rec {}", out.display()),
    ];
    host("e2fsck", &["-p", "-E", "journal_only", &copy]);
    host("debugfs", &["-R", &rdump, &copy]);
    match out.join("rec").exists() {
        true => prefix(&numbers(&out.join("rec")).0),
        false => 0,
    }
}

#[test]
fn whenever_the_power_goes_the_disk_holds_what_was_promised_before() {
    let lab = Lab::new().unwrap();
    let file = DiskFault::file(&lab, "disk", 32).unwrap();
    let (image, log) = (lab.dir().join("image"), lab.dir().join("log"));
    fs::copy(&file, &image).unwrap();
    fs::File::create(&log).unwrap().set_len(512 << 20).unwrap();
    let stage = Stage::with(lab, LoggedDisk::kernel_args(&file, &log));
    let disk = LoggedDisk::new(&stage.guest, DIR).unwrap();
    disk.mount().unwrap();
    // Several segments: their ends, their names and the state file are part of it.
    let (daemon, recorder) = stage.start_with("--rotate-size 2M");
    let (mut last, mut marks) = (0, 0);
    while last < 16_000 || marks < 20 {
        last = stage.await_mark(last, &recorder);
        disk.mark(&last.to_string()).unwrap();
        marks += 1;
    }
    let said = end(recorder);
    daemon.signal("KILL").unwrap();
    // A gap in the numbers is what the disk does not have.
    assert_eq!(stage.state()["lost"]["ring"], 0, "{said}");
    disk.end().unwrap();
    assert!(said.contains("packets recorded"), "{said}");

    let (disk, out) = (
        fs::File::options().write(true).open(&image).unwrap(),
        stage.lab.dir().join("out"),
    );
    let mut log = WriteLog::open(&log).unwrap();
    let (mut promised, mut flushes, mut found) = (0, 0, Vec::new());
    while let Some(entry) = log.step().unwrap() {
        log.apply(&entry, &disk).unwrap();
        if let Some(mark) = &entry.mark {
            promised = mark.parse().unwrap_or(promised);
        }
        flushes += usize::from(entry.is_flushed);
        // The moments just after a promise, and every fifth flush.
        if entry.mark.is_some() || entry.is_flushed && flushes % 5 == 0 {
            let survived = survives(&image, &out);
            assert!(
                survived >= promised,
                "{survived} of {promised} after {flushes} flushes"
            );
            found.push(survived);
        }
    }
    // The log is whole.
    assert_eq!(promised, last);
    assert!(
        flushes >= marks && found.len() > marks,
        "{flushes} flushes, {found:?}"
    );
    // The control: before its time nothing of what was promised last is there.
    assert!(
        found[0] < promised && found[found.len() / 2] < promised,
        "{found:?}"
    );
}
