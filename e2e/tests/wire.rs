//! Namespaces and traffic: what enters a wire leaves it, and nothing else moves.

use std::num::NonZeroU64;
use std::time::Duration;

use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Image, Lab, Netns, Uml, UmlConfig};
use vnplug_testing::PATIENCE;

#[expect(clippy::unwrap_used, reason = "a helper of tests")]
fn counter(netns: &Netns, interface: &str, name: &str) -> u64 {
    let path = format!("/sys/class/net/{interface}/statistics/{name}");
    netns.exec(&["cat", &path]).unwrap().trim().parse().unwrap()
}

#[test]
fn exactly_what_is_sent_crosses_the_wire() {
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let sent = netns
        .enter(|| {
            Stream {
                flows: 7,
                ..Stream::new("wire0", 100_000)
            }
            .send()
        })
        .unwrap()
        .unwrap();
    eprintln!(
        "flat out: {:.0} frames/s, {} retries",
        sent.pps(),
        sent.retries
    );
    assert_eq!(sent.frames, 100_000);
    assert_eq!(counter(&netns, "wire1", "rx_packets"), 100_000);
    assert_eq!(counter(&netns, "wire1", "tx_packets"), 0);
}

#[test]
fn a_rate_is_kept_on_average() {
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let stream = Stream {
        pps: NonZeroU64::new(10_000),
        ..Stream::new("wire0", 3000)
    };
    let sent = netns.enter(|| stream.send()).unwrap().unwrap();
    // 3000 frames at 10 kHz: the last is due after 299.9 ms, or when the machine has time for it.
    assert!(sent.elapsed >= Duration::from_millis(299), "{sent:?}");
    assert!(sent.elapsed < Duration::from_secs(20), "{sent:?}");
}

#[test]
fn a_frame_on_the_wire_reaches_the_vector_nic_of_a_guest_unchanged() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let guest = Uml::boot(
        &lab,
        UmlConfig {
            nics: vec!["wire1".to_owned()],
            netns: Some(netns.name().to_owned()),
            image: Image::default().program("/usr/bin/tcpdump"),
            ..UmlConfig::default()
        },
    )
    .unwrap_or_else(|error| panic!("{error}"));
    guest
        .run("ip link set vec0 promisc on up", PATIENCE)
        .unwrap();
    let capture = guest
        .spawn("tcpdump -Z root -i vec0 -w /tmp/pcap -c 3 udp")
        .unwrap();
    while !capture.peek(1000).unwrap().contains("listening on") {
        assert!(!capture.is_done(), "{:?}", capture.wait(PATIENCE));
    }
    netns
        .enter(|| {
            Stream {
                run: 77,
                ..Stream::new("wire0", 3)
            }
            .send()
        })
        .unwrap()
        .unwrap();
    assert!(capture.wait(PATIENCE).unwrap().success());

    let file = lab.dir().join("pcap");
    guest.pull("/tmp/pcap", &file, PATIENCE).unwrap();
    let bytes = std::fs::read(&file).unwrap();
    // A pcap file: 24 bytes, then per frame 16 bytes of header and the frame.
    for seq in 0..3 {
        let at = 24 + seq * (16 + 60) + 16;
        let seen = vnplug_frame::witness::parse(&bytes[at..at + 60]);
        let sent = vnplug_frame::witness::Witness {
            run: 77,
            seq: seq as u64,
        };
        assert_eq!(seen, vnplug_frame::witness::Parsed::Witness(sent));
    }
}
