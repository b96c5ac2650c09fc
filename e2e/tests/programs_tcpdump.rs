//! tcpdump as Debian ships it, on the host and in both guests, against itself on the real wire.
use vnplug_e2e::programs::{Place, Stage, same};
use vnplug_e2e::traffic::Stream;

/// What tcpdump prints of the last packet of a conversation.
const LAST: &str = ".9: UDP";

/// Every line counts: the packets with their time stamps, and the statistics.
fn whole(text: &str) -> Vec<&str> {
    text.lines().collect()
}

/// With `-c` it is everyone's own how many more came until it ended.
fn captured(text: &str) -> Vec<&str> {
    text.lines()
        .filter(|line| line.ends_with("captured"))
        .collect()
}

#[test]
fn tcpdump_prints_the_same_on_the_wire_on_the_host_and_in_both_guests() {
    let stage = Stage::new().unwrap_or_else(|error| panic!("{error}"));
    let uml = stage.uml().unwrap();
    let qemu = stage.qemu(&["/usr/bin/tcpdump"]).unwrap();
    let places = [&Place::Host, &uml, &qemu];
    // As root it becomes user tcpdump once it has the device; the QEMU guest has no such user.
    let live = "tcpdump -i {dev} -nn -tt -e -l -Z root";
    let mut watch = stage.watch(&places, live, "listening on").unwrap();
    watch.talk("live").unwrap();
    watch.until(LAST).unwrap();
    watch.signal("INT").unwrap();
    let all = watch.wait_all().unwrap();
    same(&all, whole);
    let real = &all[0];
    let packets = real.lines(|line| line.contains(" > ")).len();
    assert!(packets > 70, "{}", real.text);
    for line in [
        format!("{packets} packets captured"),
        format!("{packets} packets received by filter"),
        "0 packets dropped by kernel".to_owned(),
    ] {
        assert!(real.text.contains(&line), "{}", real.text);
    }

    let list = |place| stage.run(place, "tcpdump -D").unwrap().text;
    for place in places {
        assert!(list(place).contains("{dev}"), "{}", list(place));
    }
    assert!(list(&Place::Host).contains("wire1 [Up"), "real ones too");
}

#[test]
fn files_are_the_same_byte_for_byte() {
    let stage = Stage::new().unwrap_or_else(|error| panic!("{error}"));
    let uml = stage.uml().unwrap();
    let places = [&Place::Host, &uml];
    // Without -Z, so as user tcpdump, which may write to an open file only.
    let start = |options: &str| {
        let tcpdump = format!("tcpdump -i {{dev}} {options} -U -w - >{{dir}}/packets");
        let command = format!("sh -c 'exec {tcpdump}'");
        stage.watch(&places, &command, "listening on").unwrap()
    };
    let mut watches = [
        start("-c 40"),
        start("-s 60 -c 40"),
        start("--time-stamp-precision=nano -c 40"),
    ];
    stage.talk.say("files").unwrap();
    for watch in &mut watches {
        let all = watch.wait_all().unwrap();
        same(&all, captured);
        let real = watch.file(0, "packets").unwrap();
        assert!(real.len() > 24 + 40 * 58);
        for run in 1..=places.len() {
            let ours = watch.file(run, "packets").unwrap();
            assert!(real == ours, "run {run} and the wire");
        }
    }
}

#[test]
fn filters_choose_the_same_packets() {
    let stage = Stage::new().unwrap_or_else(|error| panic!("{error}"));
    let uml = stage.uml().unwrap();
    let filters = [
        "tcp port 80",
        // What `udp` passes on the wire, where the kernel takes a tag off before the filter runs.
        "udp or (vlan and udp)",
        "arp",
        "ip6 and tcp port 80",
        "icmp6",
        "greater 1000",
        "ether broadcast",
        "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0",
        "not host 10.78.0.1",
        "vlan 7",
        "vlan and udp port 4001",
        "vlan 9 and vlan 7",
    ];
    let places = [&Place::Host, &uml];
    let mut watches: Vec<_> = filters
        .iter()
        .map(|filter| {
            // The last packet comes first: behind `vlan` everything means what is in the tag.
            let command = format!("tcpdump -i {{dev}} -nn -tt -e -l 'udp port 9 or ({filter})'");
            stage.watch(&places, &command, "listening on").unwrap()
        })
        .collect();
    stage.talk.say("filters").unwrap();
    for (watch, filter) in watches.iter_mut().zip(filters) {
        watch.until(LAST).unwrap();
        watch.signal("INT").unwrap();
        let all = watch.wait_all().unwrap();
        same(&all, whole);
        let packets = all[0].lines(|line| line.contains(" > ")).len();
        assert!((2..60).contains(&packets), "{filter}: {packets}");
    }
}

#[test]
fn rotated_files_hold_the_same_packets() {
    let stage = Stage::new().unwrap_or_else(|error| panic!("{error}"));
    let uml = stage.uml().unwrap();
    let places = [&Place::Host, &uml];
    let options = "-Z root -i {dev} -B 16384 --immediate-mode";
    // By size: a million bytes each; the fourth is the last.
    let by_size = format!("tcpdump {options} -w {{dir}}/size -C 1 -c 2200");
    // By time: each program decides by its own clock when.
    let by_time = format!("tcpdump {options} -w {{dir}}/%s -G 1 -c 2200");
    let mut watches = [
        stage.watch(&places, &by_size, "listening on").unwrap(),
        stage.watch(&places, &by_time, "listening on").unwrap(),
    ];
    let stream = Stream {
        len_bytes: 1514,
        pps: std::num::NonZeroU64::new(1000),
        ..Stream::new("wire0", 2200)
    };
    stage.talk.near.enter(|| stream.send()).unwrap().unwrap();
    let [by_size, by_time] = &mut watches;
    same(&by_size.wait_all().unwrap(), captured);
    let names = by_size.files(0).unwrap();
    assert_eq!(names, ["size", "size1", "size2", "size3"]);
    for run in 1..=places.len() {
        assert_eq!(by_size.files(run).unwrap(), names);
        for name in &names {
            let (real, ours) = (by_size.file(0, name), by_size.file(run, name));
            assert!(real.unwrap() == ours.unwrap(), "{name} of run {run}");
        }
    }
    same(&by_time.wait_all().unwrap(), captured);
    let packets = |run| -> Vec<u8> {
        let names = by_time.files(run).unwrap();
        assert!(names.len() >= 2, "{names:?}");
        let files = names.iter().map(|name| by_time.file(run, name).unwrap());
        // After each file's header.
        files.flat_map(|file| file[24..].to_vec()).collect()
    };
    let real = packets(0);
    assert_eq!(real.len(), 2200 * (16 + 1514));
    for run in 1..=places.len() {
        assert!(real == packets(run), "run {run} and the wire");
    }
}
