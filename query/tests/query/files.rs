//! The files beside segments: made once, believed only while they fit, and never needed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::lab::{Lab, SECOND, START_NS, Sample, age, long_ago, mix, run, udp, write};

const PACKETS: &str = "select sum(packets) from flows";

fn beside(segment: &Path) -> PathBuf {
    let name = segment.file_name().unwrap().to_str().unwrap();
    segment.with_file_name(vnplug_store::name::flows_file(name))
}

/// Something that changes if a file is made again.
fn made(path: &Path) -> (u64, SystemTime) {
    use std::os::unix::fs::MetadataExt;

    let about = fs::metadata(path).unwrap();
    (about.ino(), about.modified().unwrap())
}

#[test]
fn a_file_is_made_once_and_anew_when_the_segment_changes() {
    let lab = Lab::new("anew");
    let packets = mix(4, 900);
    let segment = lab.segment(0, &packets[..500]);
    let file = beside(&segment);
    assert_eq!(lab.number(PACKETS, &[]), 500);
    let first = made(&file);
    assert_eq!(lab.number(PACKETS, &[]), 500);
    assert_eq!(made(&file), first);

    write(&segment, &packets);
    assert_eq!(lab.number(PACKETS, &[]), 900);
    let second = made(&file);
    assert_ne!(second, first);

    // The same length, another time.
    age(&segment, long_ago() - Duration::from_secs(5));
    assert_eq!(lab.number(PACKETS, &[]), 900);
    let third = made(&file);
    assert_ne!(third, second);

    for rubbish in [&b""[..], b"PAR1", &[7; 5000]] {
        fs::write(&file, rubbish).unwrap();
        assert_eq!(lab.number(PACKETS, &[]), 900);
    }
    fs::copy(&file, lab.path("other")).unwrap();
    let other = lab.segment(1, &packets[..10]);
    fs::rename(lab.path("other"), beside(&other)).unwrap();
    assert_eq!(lab.number(PACKETS, &[]), 910);
    assert!(!lab.path("t.tmp").exists());
    let left = fs::read_dir(&lab.0).unwrap().count();
    assert_eq!(left, 4, "two segments and a file beside each");
}

#[test]
fn rows_are_read_into_memory_where_no_file_may_be() {
    let lab = Lab::new("memory");
    let packets = mix(5, 600);
    let open = lab.segment(0, &packets[..100]);
    // Written to just now, however slow this machine is.
    age(&open, SystemTime::now() + Duration::from_secs(3600));
    let blocked = lab.segment(1, &packets[100..300]);
    let mut temporary = beside(&blocked).into_os_string();
    temporary.push(".tmp");
    fs::create_dir(&temporary).unwrap();
    let closed = lab.segment(2, &packets[300..]);
    assert_eq!(lab.number(PACKETS, &["--no-files"]), 600);
    assert!(!beside(&closed).exists());
    assert_eq!(lab.number(PACKETS, &[]), 600);
    assert!(beside(&closed).exists());
    assert!(!beside(&open).exists() && !beside(&blocked).exists());
    let open = lab.lines("select open from segments order by segment", &[]);
    assert_eq!(open, ["true", "false", "false"]);
    let text = lab.refusal(PACKETS, &["--memory", "1K"]);
    assert!(text.contains("more memory than --memory allows"), "{text}");
}

#[test]
fn a_segment_that_a_recorder_closed_needs_no_age() {
    let lab = Lab::new("closed");
    let segment = lab.segment(0, &mix(6, 50));
    assert!(vnplug_store::index::rebuild(&segment).unwrap());
    age(&segment, SystemTime::now() + Duration::from_secs(3600));
    assert_eq!(lab.number(PACKETS, &[]), 50);
    assert!(beside(&segment).exists());
}

#[test]
fn what_a_killed_one_left_is_taken_over() {
    let lab = Lab::new("left");
    let segment = lab.segment(0, &mix(7, 50));
    let mut temporary = beside(&segment).into_os_string();
    temporary.push(".tmp");
    fs::write(&temporary, vec![9; 100_000]).unwrap();
    assert_eq!(lab.number(PACKETS, &[]), 50);
    assert!(!Path::new(&temporary).exists());
    assert!(fs::metadata(beside(&segment)).unwrap().len() < 100_000);
}

#[test]
fn prepare_makes_them_and_says_so_once() {
    let lab = Lab::new("prepare");
    let segment = lab.segment(0, &mix(8, 70));
    let prepare = || {
        let output = run(&["--prepare", lab.0.to_str().unwrap()]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(
        prepare(),
        format!("{}: made, 70 packets\n", beside(&segment).display())
    );
    assert_eq!(prepare(), "");
    assert_eq!(lab.number(PACKETS, &["--no-files"]), 70);
}

#[test]
fn capture_files_of_others_and_strange_names_are_fine() {
    let lab = Lab::new("names");
    let dir = lab.path("a b%41[x]?*'é");
    fs::create_dir(&dir).unwrap();
    write(&dir.join("x.pcapng"), &mix(9, 30));
    write(&dir.join("x.pcap"), &mix(10, 40));
    write(&dir.join("y#z%20.pcapng"), &mix(11, 50));
    let dir = dir.to_str().unwrap();
    let ask = || {
        let output = run(&[PACKETS, dir, "--format", "csv"]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(ask().ends_with("\n120\n"));
    assert!(ask().ends_with("\n120\n"));
    assert!(Path::new(dir).join("x.pcap.flows.parquet").exists());
}

#[test]
fn what_is_whole_in_a_damaged_segment_is_counted_and_the_damage_told() {
    let lab = Lab::new("damage");
    let frame = |n: u64| udp([10, 0, 0, 1], [10, 0, 0, 2], [n as u16, 53], 1400);
    let packet = |n: u64| Sample::new(START_NS + n * SECOND / 1000, frame(n));
    let segment = lab.segment(0, &(0..4000).map(packet).collect::<Vec<_>>());
    assert!(vnplug_store::index::rebuild(&segment).unwrap());
    let mut bytes = fs::read(&segment).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 3000].fill(0xee);
    fs::write(&segment, bytes).unwrap();
    age(&segment, long_ago());
    for _ in 0..2 {
        let output = lab.try_ask(PACKETS, &["--format", "csv"]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let count: u64 = text.lines().nth(1).unwrap().parse().unwrap();
        // The index tells where to go on: at most a chunk is lost.
        assert!((3700..4000).contains(&count), "{count}");
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.contains("byte"), "{errors}");
    }
    let output = lab.try_ask(
        "select damaged, problem is null from segments",
        &["--format", "csv"],
    );
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .ends_with("\ntrue,false\n")
    );
}

#[test]
fn a_closed_segment_that_was_cut_off_is_damaged_and_not_open() {
    let lab = Lab::new("cut");
    let segment = lab.segment(0, &mix(13, 600));
    assert!(vnplug_store::index::rebuild(&segment).unwrap());
    let len = fs::metadata(&segment).unwrap().len();
    let file = fs::File::options().write(true).open(&segment).unwrap();
    let sql = "select open, damaged, problem from segments";
    for cut in [len / 2, 0] {
        file.set_len(cut).unwrap();
        // The second time its rows are beside it.
        for _ in 0..2 {
            let output = lab.try_ask(sql, &["--format", "csv"]);
            let words = format!("is cut off: {cut} bytes of the {len}");
            let answer = String::from_utf8(output.stdout).unwrap();
            let told = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{told}");
            assert!(told.contains(&words), "{told}");
            assert!(
                answer.contains("false,true,") && answer.contains(&words),
                "{answer}"
            );
        }
    }
}

#[test]
fn a_packet_that_is_not_whole_yet_is_not_damage() {
    let lab = Lab::new("torn");
    let segment = lab.segment(0, &mix(12, 200));
    let len = fs::metadata(&segment).unwrap().len();
    let file = fs::File::options().write(true).open(&segment).unwrap();
    file.set_len(len - 7).unwrap();
    age(&segment, long_ago());
    assert_eq!(lab.number(PACKETS, &[]), 199);
    assert_eq!(lab.lines("select damaged from segments", &[]), ["false"]);
}
