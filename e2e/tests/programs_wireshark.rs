//! dumpcap and tshark as Debian ships them, against themselves on the real wire.

use std::process::Command;

use vnplug_e2e::programs::{Place, Seen, Stage, Watch, same};

/// Fields of packets, one line each.
const FIELDS: &str = "-T fields -e frame.time_epoch -e eth.src -e vlan.id -e ip.src -e ipv6.src \
                      -e icmp.seq -e tcp.seq_raw -e dns.id -e dhcp.type -e udp.dstport -e frame.len";

/// Behind what is told about itself, by child processes at any time. In the order of their time
/// stamps: two CPUs bring packets to two listeners at once, and to each in an order of its own.
fn packets(text: &str) -> Vec<&str> {
    let mut packets: Vec<&str> = text.lines().filter(|line| line.contains('\t')).collect();
    packets.sort_unstable();
    packets
}

/// Reads a capture file on the host; lines as of [`packets`].
#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn fields(bytes: &[u8], stage: &Stage, filter: &str) -> String {
    let path = stage.lab.dir().join("read.pcapng");
    std::fs::write(&path, bytes).unwrap();
    let mut tshark = Command::new("tshark");
    tshark
        .arg("-r")
        .arg(path)
        .args(["-n", "-Y", filter])
        .args(FIELDS.split_whitespace());
    let text = String::from_utf8(tshark.output().unwrap().stdout).unwrap();
    packets(&text).join("\n")
}

/// Checks that the capture files of all places hold the packets of the wire's, and counts those.
#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn same_files(watch: &Watch<'_>, name: &str, places: usize, stage: &Stage) -> usize {
    let read = |run| Seen {
        place: if run == 0 { "wire" } else { "a place" },
        status: 0,
        text: fields(&watch.file(run, name).unwrap(), stage, "frame"),
    };
    let all: Vec<Seen> = (0..=places).map(read).collect();
    same(&all, packets);
    packets(&all[0].text).len()
}

#[test]
fn tshark_and_dumpcap_see_the_same_packets() {
    let stage = Stage::new().unwrap_or_else(|error| panic!("{error}"));
    let uml = stage.uml().unwrap();
    let places = [&Place::Host, &uml];
    for list in ["tshark -D", "dumpcap -D"] {
        for place in places {
            let Seen { text, .. } = stage.run(place, list).unwrap();
            assert!(
                text.contains(". {dev}"),
                "{list} ({}): {text}",
                place.name()
            );
            assert!(text.contains(". lo (Loopback)"), "real ones too: {text}");
        }
    }
    let filter = "tcp port 80 or udp port 53 or udp port 9";
    let live = format!("tshark -i {{dev}} -f '{filter}' -l -n {FIELDS}");
    // Three pings, their answers, SYN and its answer: each is caused by the one before it.
    let file = "dumpcap -q -i {dev} -f 'ip6 or port 9' -w {dir}/file -a packets:8";
    let every = "dumpcap -q -i {dev} -w {dir}/every";
    let mut live = stage.watch(&places, &live, "Capturing on").unwrap();
    let mut file = stage.watch(&places, file, "File: ").unwrap();
    let mut every = stage.watch(&places, every, "File: ").unwrap();
    stage.talk.say("live").unwrap();
    // The last packet: to port 9 of the far end.
    live.until("\t9\t4").unwrap();
    live.signal("INT").unwrap();
    let all = live.wait_all().unwrap();
    same(&all, packets);
    assert!(packets(&all[0].text).len() > 30, "{}", all[0].text);

    file.wait_all().unwrap();
    assert_eq!(same_files(&file, "file", places.len(), &stage), 8);
    let last = |bytes: &[u8]| bytes.windows(4).any(|four| four == b"live");
    every.until_file("every", last).unwrap();
    every.signal("INT").unwrap();
    every.wait_all().unwrap();
    let count = same_files(&every, "every", places.len(), &stage);
    assert!(count > 70, "{count}");
    // It ends in time though no packet wakes it.
    let late = "dumpcap -q -i {dev} -w {dir}/late -a duration:1";
    for seen in stage
        .watch(&places, late, "File: ")
        .unwrap()
        .wait_all()
        .unwrap()
    {
        assert_eq!(seen.status, 0, "{}: {}", seen.place, seen.text);
    }
}

#[test]
fn dumpcap_reads_a_real_interface_and_ours_at_once() {
    let stage = Stage::new().unwrap_or_else(|error| panic!("{error}"));
    // On the real wire it listens twice; what both see is compared within the one file.
    let both = "dumpcap -q -i wire1 -i {dev} -w {dir}/both";
    let mut watch = stage.watch(&[&Place::Host], both, "File: ").unwrap();
    watch.talk("both").unwrap();
    // Several blocks of the file hold the last packet.
    let last = |bytes: &[u8]| bytes.windows(4).filter(|four| four == b"both").count() >= 2;
    watch.until_file("both", last).unwrap();
    watch.signal("INT").unwrap();
    watch.wait_all().unwrap();
    let file = watch.file(1, "both").unwrap();
    let real = fields(&file, &stage, "frame.interface_id == 0");
    assert!(real.lines().count() > 70, "{real}");
    assert_eq!(fields(&file, &stage, "frame.interface_id == 1"), real);
}
