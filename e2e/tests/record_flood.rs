//! A recorder that gets more than its disk takes: its files are whole for everybody, while they grow and
//! after it was killed in the middle of its writes.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_e2e::recorder::{Recorder, packets_by_capinfos, read_by, segments};
use vnplug_store::read::Reader;

/// Written before a recorder is killed: more than its buffers hold, so that it always has a backlog.
const ENOUGH: u64 = 300_000_000;

/// tcpdump and capinfos, which must have no complaint; the number is the latter's.
fn whole(file: &Path) -> u64 {
    read_by(&["tcpdump", "-w", "/dev/null", "-r"], file);
    packets_by_capinfos(file)
}

#[test]
fn what_a_flooded_recorder_leaves_is_whole() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,size=1400,flows=1000";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    for round in 0..6 {
        let dir = lab.dir().join(format!("rec{round}"));
        let args = ["host:lab", "--rotate-size", "100M", "--flush", "50ms"];
        let args = [&args[..], &["--buffer", "128M"]].concat();
        let mut recorder = Recorder::start(&daemon, &args, &[&dir]).unwrap();
        let (mut looked, bytes) = (0, |file: &PathBuf| fs::metadata(file).unwrap().len());
        recorder.until("it writes", || {
            // The one that is being written, now.
            let files = segments(&dir);
            if let Some(open) = files.last()
                && bytes(open) > 0
            {
                whole(open);
                looked += 1;
            }
            sleep(Duration::from_millis(3 * round));
            recorder.mark() > 0 && files.iter().map(bytes).sum::<u64>() >= ENOUGH
        });
        recorder.kill();
        assert!(looked > 0);
        let (promised, mut found) = (recorder.mark(), 0);
        for file in segments(&dir) {
            let mut reader = Reader::open(&file).unwrap();
            let mut packets = 0;
            while reader.read().unwrap().is_some() {
                packets += 1;
            }
            assert_eq!(whole(&file), packets, "{}", file.display());
            found += packets;
        }
        assert!(found >= promised, "{promised} promised, {found} there");
        fs::remove_dir_all(&dir).unwrap();
    }
}
