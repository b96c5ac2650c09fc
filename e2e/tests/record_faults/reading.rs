//! What was recorded is read from a disk with bad sectors.

use std::path::Path;
use std::process::Command;

use vnplug_e2e::traffic::sequence;
use vnplug_e2e::{DiskFault, Fault, Lab};
use vnplug_store::read::Reader;
use vnplug_testing::PATIENCE;

use crate::stage::{DIR, PROGRAMS, Stage, end};

#[test]
fn what_can_be_read_is_extracted_and_the_bad_place_is_told() {
    let lab = Lab::new().unwrap();
    let file = DiskFault::file(&lab, "disk", 64).unwrap();
    let stage = Stage::with(lab, vec![DiskFault::kernel_arg(&file)]);
    let disk = DiskFault::new(&stage.guest, DIR).unwrap();
    disk.mount().unwrap();
    let (_daemon, recorder) = stage.start_with("--rotate-size 2M");
    stage.await_mark(15_000, &recorder);
    end(recorder);
    let (all, segments) = stage.recorded();
    assert!(segments >= 3, "{segments}");
    let names = stage.works("ls /world/mnt/rec");
    let bad = names
        .lines()
        .filter(|name| name.ends_with(".pcapng"))
        .nth(1)
        .unwrap();

    // Where it lies: the file system is on the disk only when it is not mounted.
    disk.unmount().unwrap();
    let block_bytes = number(&debugfs(&file, "show_super_stats -h"), "Block size:");
    let middle = (1 << 20) / block_bytes;
    let block = number(&debugfs(&file, &format!("bmap /rec/{bad} {middle}")), "");
    disk.mount().unwrap();
    let command = |what: &str| {
        let output = "/host/found.pcapng";
        let run = format!("world {PROGRAMS}/vnplug {what} >{output}");
        let output = stage.guest.run(&run, PATIENCE).unwrap();
        let out = stage.guest.shared_dir().unwrap().join("found.pcapng");
        (output.success(), output.text(), out)
    };
    let bad_sectors = Fault::Sectors {
        first: block * block_bytes / 512,
        count: 8,
    };
    disk.set(bad_sectors).unwrap();
    stage.works("echo 3 >/proc/sys/vm/drop_caches");
    let (succeeded, said, out) = command("extract /mnt/rec");
    let told = said.contains(bad) && said.contains("Input/output error");
    assert!(!succeeded && told, "{said}");
    let found = of(&out);
    assert!(
        found.is_sorted_by(|one, other| one < other),
        "twice, or out of order"
    );
    assert!(
        found.len() < all.len() && found.len() * 4 > all.len() * 3,
        "{} of {}",
        found.len(),
        all.len()
    );
    assert_eq!((found[0], found.last()), (all[0], all.last()));
    let (succeeded, said, _) = command("flows /mnt/rec");
    assert!(!succeeded && said.contains(bad), "{said}");
    // An index is not made of half a file.
    disk.set(Fault::None).unwrap();
    let index = bad.replace(".pcapng", ".vnx");
    stage.works(&format!(
        "cd /world/mnt/rec && rm {index} && touch -d '2020-01-01 00:00' {bad} && sync"
    ));
    disk.set(bad_sectors).unwrap();
    stage.works("echo 3 >/proc/sys/vm/drop_caches");
    let (succeeded, said, _) = command("index /mnt/rec");
    assert!(!succeeded && said.contains(bad), "{said}");
    stage.works(&format!("! [ -e /world/mnt/rec/{index} ]"));
    // The control: it is the sectors.
    disk.set(Fault::None).unwrap();
    let (succeeded, said, out) = command("extract /mnt/rec");
    assert!(succeeded, "{said}");
    assert_eq!(of(&out), all);
}

/// Numbers of the frames in a file.
fn of(file: &Path) -> Vec<u64> {
    let mut reader = Reader::open(file).unwrap();
    let mut numbers = Vec::new();
    while let Some(packet) = reader.read().unwrap() {
        numbers.push(sequence(packet.bytes));
    }
    numbers
}

/// What debugfs says of a disk's file.
fn debugfs(file: &Path, request: &str) -> String {
    let mut command = Command::new("debugfs");
    command.args(["-R", request]).arg(file);
    let output = command.env("PATH", "/usr/sbin:/sbin").output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// The number after a word.
fn number(text: &str, behind: &str) -> u64 {
    let rest = &text[text.find(behind).unwrap() + behind.len()..];
    let digits: String = rest
        .trim_start()
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().unwrap()
}
