//! Super-frames through the kernel, whole and cut, beside our own cut.

use std::process::Command;

use vnplug_frame::offload::{Pieces, work};
use vnplug_frame::witness::seed;
use vnplug_path::source::af_packet::AfPacketConfig;
use vnplug_path::source::{Queue, Transmit};
use vnplug_ring::layout::flags;
use vnplug_ring::offload::{Offload, gso};
use vnplug_testing::PATIENCE;

use crate::net::{config, ip, isolated, open, out, read, read_all, rx, veth};

#[path = "../../../frame/src/offload/samples.rs"]
mod samples;

/// A super-frame as a sender leaves it to the kernel, which cuts it into two packets or more.
struct Sample {
    frame: Vec<u8>,
    offload: Offload,
}

impl Sample {
    /// `udp`: also UDP, which kernels before 6.2 do not take from packet sockets.
    fn any(dice: &mut impl FnMut(usize) -> usize, udp: bool) -> Self {
        let (mut recipe, size) = samples::any(dice);
        recipe.is_udp &= udp;
        // No kernel takes more than 64 datagrams as one; since 6.8 some take 128.
        let size = if recipe.is_udp { size.max(400) } else { size };
        recipe.payload += usize::from(size);
        let (mut frame, transport, _) = samples::frame(&recipe);
        samples::leave_sum(&mut frame, &recipe, transport);
        let mut offload = samples::offload(&recipe, transport, size);
        // Without this flag the kernel takes CWR off the later packets all the same; we leave it there,
        // as accurate ECN wants it.
        if !recipe.is_udp && recipe.tcp_flags & 0x80 != 0 {
            offload.gso_type |= gso::ECN;
        }
        Self { frame, offload }
    }

    fn ours(&self) -> Vec<Vec<u8>> {
        let wire_len = self.frame.len() as u32;
        let work = work(&self.frame, wire_len, &self.offload).expect("it fits");
        let mut pieces = Pieces::default();
        let made = pieces.make(&self.frame, wire_len, &work.expect("it is to be cut"));
        made.map(|at| pieces.get(at, &self.frame))
            .map(|piece| [piece.head, piece.body].concat())
            .collect()
    }

    fn send(&self, queue: &mut dyn Queue) {
        let mut send = || out(queue).transmit_offloaded(&self.frame, &self.offload);
        assert_eq!(send(), Transmit::Taken);
        let flushed = out(queue).flush(&mut |_| {});
        assert_eq!(flushed.sent, 1, "{flushed:?} {:?}", self.offload);
    }
}

fn ethtool(words: &str) {
    let output = Command::new("ethtool").args(words.split(' ')).output();
    let output = output.expect("run ethtool");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ethtool {words}: {said}");
}

/// A pair whose end `va` is left super-frames or has them cut, and the queues: out of `va`, in at `vb`.
fn pair(cuts: bool) -> (Box<dyn Queue>, Box<dyn Queue>) {
    veth();
    ip("link set va mtu 9200");
    ip("link set vb mtu 9200");
    if cuts {
        ethtool("-K va tx off tso off tx-udp-segmentation off");
    }
    let offload = true;
    let open = |config: AfPacketConfig| open(AfPacketConfig { offload, ..config });
    (open(config("va")), open(rx("vb")))
}

/// Super-frames that are sent before their packets are read: of 200 packets at most.
const AT_ONCE: usize = 4;

/// Whether the kernel takes UDP super-frames, too.
fn has_udp() -> bool {
    AfPacketConfig::new("any").offload
}

#[test]
fn a_super_frame_in_packets_that_the_mtu_does_not_allow_is_too_long_at_once() {
    isolated(|| {
        let (mut sender, _receiver) = pair(false);
        let (frame, transport, _) = samples::frame(&samples::PLAIN);
        let mut send = |size: u16| {
            let offload = samples::offload(&samples::PLAIN, transport, size);
            let taken = out(sender.as_mut()).transmit_offloaded(&frame, &offload);
            (taken, out(sender.as_mut()).flush(&mut |_| {}).sent)
        };
        // Headers of 52 bytes behind that of Ethernet.
        for mtu in [9200, 1500, 1400, 4000] {
            ip(&format!("link set va mtu {mtu}"));
            let size = mtu.min(4000) - 52;
            assert_eq!(send(size), (Transmit::Taken, 1), "{mtu}");
            let expected = match mtu {
                9200 => (Transmit::Taken, 1),
                _ => (Transmit::BadLength, 0),
            };
            assert_eq!(send(size + 1), expected, "{mtu}");
        }
    });
}

#[test]
fn our_cut_is_the_kernels_byte_for_byte() {
    isolated(|| {
        if !has_udp() {
            eprintln!("SKIPPED: super-frames of UDP, which take Linux 6.2");
        }
        let usual = match std::env::var_os("VNPLUG_LONG") {
            Some(_) => 1_000_000,
            None => 8000,
        };
        let count = std::env::var("VNPLUG_SUPER_FRAMES");
        let count: usize = count.map_or(usual, |text| text.parse().expect("a number"));
        let mut dice = samples::dice(seed("the kernel's cut"));
        let (mut queue, mut received) = pair(true);
        let mut packets = 0;
        // Fewer packets than the other end's queue holds.
        for _ in 0..count / AT_ONCE {
            let mut ours = Vec::new();
            for _ in 0..AT_ONCE {
                let sample = Sample::any(&mut dice, has_udp());
                sample.send(queue.as_mut());
                ours.extend(sample.ours());
            }
            // One too many would be the next one's first.
            let kernels = read(received.as_mut(), ours.len(), PATIENCE);
            assert_eq!(kernels.len(), ours.len());
            for (kernels, ours) in kernels.iter().zip(&ours) {
                assert_eq!(kernels.flags & flags::OFFLOAD, 0);
                assert!(
                    kernels.bytes == *ours,
                    "{:02x?}\n{ours:02x?}",
                    kernels.bytes
                );
            }
            packets += ours.len();
        }
        assert!(read_all(received.as_mut(), 0).is_empty());
        println!("{count} super-frames, {packets} packets");
    });
}

#[test]
fn a_super_frame_arrives_whole_with_what_is_left_to_do() {
    isolated(|| {
        let mut dice = samples::dice(seed("whole super-frames"));
        let (mut queue, mut received) = pair(false);
        for _ in 0..300 {
            let sample = Sample::any(&mut dice, has_udp());
            sample.send(queue.as_mut());
            let got = read_all(received.as_mut(), 1).remove(0);
            assert!(got.bytes == sample.frame, "{:02x?}", sample.frame);
            assert_eq!(got.offload, sample.offload);
            let left = flags::OFFLOAD | flags::CSUM_NOT_READY;
            assert_eq!(got.flags & left, left);
        }
    });
}

#[test]
fn without_the_option_nothing_is_known_of_super_frames() {
    isolated(|| {
        let (mut queue, _) = pair(false);
        let mut plain = open(AfPacketConfig {
            offload: false,
            ..rx("vb")
        });
        let sample = Sample::any(&mut samples::dice(7), false);
        sample.send(queue.as_mut());
        let got = read_all(plain.as_mut(), 1).remove(0);
        assert_eq!(got.bytes, sample.frame);
        let left = flags::OFFLOAD | flags::CSUM_NOT_READY;
        assert_eq!(got.flags & left, flags::CSUM_NOT_READY);
        assert_eq!(got.offload, Offload::default());
        // And it sends none.
        assert!(!out(plain.as_mut()).takes_offload());
    });
}

#[test]
fn what_the_kernel_found_right_is_told_to_be_and_no_other() {
    isolated(|| {
        // The kernel merges nothing of an end that could take super-frames.
        let (mut sender, mut received) = pair(true);
        let (mut frame, transport, _) = samples::frame(&samples::PLAIN);
        samples::leave_sum(&mut frame, &samples::PLAIN, transport);
        let offload = samples::offload(&samples::PLAIN, transport, 1000);
        let right = Sample { frame, offload }.ours().remove(0);
        let mut wrong = right.clone();
        *wrong.last_mut().expect("bytes") ^= 1;
        // Who merges, as `gro` does, checks the sum, as a card does.
        for checks in [true, false] {
            ethtool(&format!("-K vb gro {}", if checks { "on" } else { "off" }));
            for (frame, is_right) in [(&right, true), (&wrong, false)] {
                assert_eq!(out(sender.as_mut()).transmit(frame), Transmit::Taken);
                assert_eq!(out(sender.as_mut()).flush(&mut |_| {}).sent, 1);
                let got = read_all(received.as_mut(), 1).remove(0);
                assert!(got.bytes == *frame);
                assert_eq!(got.flags & flags::OFFLOAD, 0);
                assert_eq!(got.offload.is_valid(), checks && is_right, "{checks}");
            }
        }
    });
}
