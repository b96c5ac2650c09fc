//! Clients of plain sockets (stream, bess, dgram) that are honest and that are not, on a switch that a
//! thread of the test serves.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, recv, sendmsg, socket_with, sockopt,
};
use vnplug_switch::Switch;
use vnplug_testing::{TestDir, eventually};

use self::plain::{Client, Named, Packets, Stream, config, served, with_length};
use self::served::{ALL, Served, frame};

mod plain;
mod served;

fn ports(switch: &Served, count: u64) {
    eventually("the ports are right", || {
        switch.count("switch_ports") == count
    });
}

/// Its number, as `frame` has it.
fn number(frame: &[u8]) -> u32 {
    u32::from_be_bytes(frame[14..18].try_into().unwrap())
}

#[test]
fn all_kinds_hear_each_other_and_leave_nothing_behind() {
    let home = TestDir::new("sockets");
    let switch = served(&home);
    let clients: [Box<dyn Client>; 6] = [
        Box::new(Stream::join(&home)),
        Box::new(Packets::join(&home)),
        Box::new(Named::join(&home, "one")),
        Box::new(Stream::join(&home)),
        Box::new(Packets::join(&home)),
        Box::new(Named::join(&home, "two")),
    ];
    ports(&switch, 6);
    let mut sent = Vec::new();
    for (at, client) in clients.iter().enumerate() {
        let frame = frame(ALL, at as u8, 0, 60);
        client.send(&frame);
        for (other, client) in clients.iter().enumerate() {
            if other != at {
                assert_eq!(client.next(), frame, "{at} to {other}");
            }
        }
        sent.push(frame);
    }
    for len in [14, 60, 1514, 9000] {
        for (from, sender) in clients.iter().enumerate() {
            for (to, receiver) in clients.iter().enumerate().filter(|(to, _)| *to != from) {
                let frame = frame(to as u8, from as u8, len as u32, len);
                sender.send(&frame);
                assert_eq!(receiver.next(), frame, "{from} to {to}");
                sent.push(frame);
            }
        }
    }
    eventually("all is captured", || {
        switch.seen.lock().unwrap().len() == sent.len()
    });
    assert_eq!(*switch.seen.lock().unwrap(), sent);
    eventually("all is counted", || switch.count("entered") == 126);
    assert_eq!((switch.count("unicast"), switch.count("flooded")), (120, 6));
    switch.check_sums();
    drop(clients);
    ports(&switch, 0);
    let names = || {
        let entries = std::fs::read_dir(home.path("dgram")).unwrap();
        let names = entries.map(|it| it.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.ends_with(".port")).count()
    };
    eventually("our names are gone", || names() == 0);
    drop(switch);
    assert!(!home.path("stream").exists() && !home.path("bess").exists());
}

#[test]
fn frames_come_whole_however_the_stream_is_cut() {
    let home = TestDir::new("sockets");
    let switch = served(&home);
    let [one, other] = [0; 2].map(|_| Stream::join(&home));
    ports(&switch, 2);
    // Lengths and frames, one byte at a time.
    let first = frame(ALL, 0, 1, 100);
    for byte in with_length(&first) {
        one.write(&[byte]);
    }
    assert_eq!(other.next(), first);
    // Many in one write, then as many bytes at a time as cut them everywhere.
    let frames: Vec<_> = (0..2000)
        .map(|number| frame(ALL, 0, number, 20 + (number as usize * 7) % 1500))
        .collect();
    // As many at a time as nobody has to drop.
    for some in frames.chunks(100) {
        let bytes: Vec<u8> = some.iter().flat_map(|it| with_length(it)).collect();
        bytes.chunks(4099).for_each(|part| one.write(part));
        for frame in some {
            assert!(other.next() == *frame, "{}", number(frame));
        }
    }
    switch.check_sums();
}

#[test]
fn who_sends_a_length_that_no_frame_has_is_closed_and_nobody_else() {
    let home = TestDir::new("sockets");
    let switch = served(&home);
    let [one, other] = [0; 2].map(|_| Stream::join(&home));
    ports(&switch, 2);
    for lie in [0_u32, 69_633, 1 << 31, u32::MAX] {
        let liar = Stream::join(&home);
        ports(&switch, 3);
        let before = frame(ALL, 7, lie, 60);
        let bytes = [&with_length(&before)[..], &lie.to_be_bytes(), &[0; 100]].concat();
        liar.write(&bytes);
        // What it sent before is forwarded.
        assert_eq!(other.next(), before);
        assert_eq!(one.next(), before);
        assert!(liar.is_closed(), "{lie}");
        ports(&switch, 2);
    }
    // Half a frame, then the end: nobody gets it.
    let half = Stream::join(&home);
    ports(&switch, 3);
    half.write(&with_length(&frame(ALL, 7, 0, 1000))[..500]);
    drop(half);
    ports(&switch, 2);
    // The control: who says what is true is served on.
    let good = frame(ALL, 0, 5, 60);
    one.send(&good);
    assert_eq!(other.next(), good);
    eventually("all is counted", || switch.count("entered") == 5);
    switch.check_sums();
}

#[test]
fn what_is_too_long_or_short_is_counted_and_the_port_lives() {
    let home = TestDir::new("sockets");
    let switch = served(&home);
    let clients: [Box<dyn Client>; 3] = [
        Box::new(Stream::join(&home)),
        Box::new(Packets::join(&home)),
        Box::new(Named::join(&home, "one")),
    ];
    let reader = Stream::join(&home);
    ports(&switch, 4);
    for (at, one) in (1..).zip(&clients) {
        one.send(&frame(ALL, 0, 0, 9239));
        one.send(&frame(ALL, 0, 0, 69_632));
        one.send(&[7; 13]);
        let good = frame(ALL, at, 0, 9238);
        one.send(&good);
        assert_eq!(reader.next(), good);
        eventually("all is counted", || {
            switch.count("entered") == u64::from(at) * 4
        });
        let dropped = ["in_dropped_long", "in_dropped_short"];
        let expected = [2, 1].map(|it| it * u64::from(at));
        assert_eq!(dropped.map(|name| switch.count(name)), expected);
    }
    switch.check_sums();
}

#[test]
fn who_never_reads_costs_itself_only_and_finds_whole_frames_in_order() {
    let home = TestDir::new("sockets");
    let switch = served(&home);
    let [sender, reader, sleeper] = [0; 3].map(|_| Stream::join(&home));
    let napper = Packets::join(&home);
    ports(&switch, 4);
    let count = 20_000_u32;
    for round in 0..count / 50 {
        let numbers = round * 50..(round + 1) * 50;
        let frames: Vec<_> = numbers.map(|it| frame(ALL, 0, it, 1000)).collect();
        frames.iter().for_each(|frame| sender.send(frame));
        for frame in &frames {
            assert_eq!(reader.next(), *frame);
        }
    }
    eventually("all is counted", || {
        switch.count("entered") == u64::from(count)
    });
    let dropped = switch.count("out_dropped_full");
    switch.check_sums();
    // Now they read: what is there is what came first, whole, without a gap.
    let limit = Some(Duration::from_millis(300));
    sleeper.0.set_read_timeout(limit).unwrap();
    let mut bytes = Vec::new();
    let mut chunk = [0; 65536];
    while let Ok(count) = (&sleeper.0).read(&mut chunk) {
        bytes.extend_from_slice(&chunk[..count]);
    }
    assert_eq!(bytes.len() % 1004, 0, "whole frames");
    let slept: Vec<u32> = bytes.chunks(1004).map(|it| number(&it[4..])).collect();
    assert_eq!(slept, (0..slept.len() as u32).collect::<Vec<_>>());
    assert!(slept.len() > 500, "{}", slept.len());
    sockopt::set_socket_timeout(&napper.0, sockopt::Timeout::Recv, limit).unwrap();
    let mut napped = Vec::new();
    while let Ok((_, len)) = recv(&napper.0, &mut chunk[..], RecvFlags::empty()) {
        napped.push(number(&chunk[..len]));
    }
    assert_eq!(napped, (0..napped.len() as u32).collect::<Vec<_>>());
    let had = (slept.len() + napped.len()) as u64;
    assert_eq!(had + dropped, 2 * u64::from(count));
    // And what comes then comes at once.
    sleeper
        .0
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let last = frame(ALL, 0, count, 60);
    sender.send(&last);
    assert_eq!(sleeper.next(), last);
}

fn send_null(to: impl AsFd, bytes: &[u8]) -> Result<usize, Errno> {
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let fds = [null.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(
        to,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )
}

#[test]
fn who_sends_descriptors_does_not_get_through_and_nobody_else_notices() {
    let home = TestDir::new("sockets");
    let switch = served(&home);
    let [one, other, liar] = [0; 3].map(|_| Stream::join(&home));
    let packets = Packets::join(&home);
    ports(&switch, 4);
    let bytes = frame(ALL, 3, 0, 60);
    // Where the kernel can refuse them (Linux 6.16) it does, elsewhere the port is closed.
    let mut left = 4;
    for sent in [
        send_null(&liar.0, &with_length(&bytes)),
        send_null(&packets.0, &bytes),
    ] {
        match sent {
            Err(error) => assert_eq!(error, Errno::PERM),
            Ok(_) => left -= 1,
        }
    }
    ports(&switch, left);
    let good = frame(ALL, 0, 1, 60);
    one.send(&good);
    assert_eq!(other.next(), good);
    switch.check_sums();
}

#[test]
fn a_flood_of_connections_takes_ports_of_its_own_only() {
    let home = TestDir::new("sockets");
    let mut config = config(&home);
    config.ports = (8, 8);
    let switch = Served::new(config).0;
    let [one, other] = [0; 2].map(|_| Stream::join(&home));
    ports(&switch, 2);
    // More than there are ports for, at once and in turns.
    let held: Vec<_> = (0..20).map(|_| Stream::join(&home)).collect();
    ports(&switch, 8);
    for _ in 0..3000 {
        drop(UnixStream::connect(home.path("stream")).unwrap());
    }
    let good = frame(ALL, 0, 1, 60);
    one.send(&good);
    assert_eq!(other.next(), good);
    let refused = held.iter().filter(|it| {
        let _ = it.0.set_read_timeout(Some(Duration::from_millis(50)));
        matches!((&it.0).read(&mut [0; 1]), Ok(0))
    });
    assert_eq!(refused.count(), 14, "those without a port are hung up on");
    drop(held);
    ports(&switch, 2);
    // Dead ones may still wait to be let in, each for a moment.
    let mut late = Packets::join(&home);
    eventually("a frame comes to it", || {
        one.send(&good);
        match late.look() {
            Some(0) => late = Packets::join(&home),
            Some(len) => return len == good.len(),
            None => {}
        }
        false
    });
    ports(&switch, 3);
    assert_eq!(late.next(), good);
    switch.check_sums();
}

#[test]
fn what_a_killed_switch_left_is_taken_over_and_a_living_ones_is_not() {
    let home = TestDir::new("sockets");
    let first = served(&home);
    let error = Switch::open(config(&home)).err().unwrap().to_string();
    assert!(error.contains("another daemon serves"), "{error}");
    drop(first);
    for name in ["stream", "bess"] {
        // A socket that nobody serves.
        let kind = match name {
            "bess" => SocketType::SEQPACKET,
            _ => SocketType::STREAM,
        };
        let left = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&left, &SocketAddrUnix::new(home.path(name)).unwrap()).unwrap();
    }
    // No other file is taken.
    std::fs::write(home.path("file"), "mine").unwrap();
    let mut other = config(&home);
    other.sockets.stream = Some(home.path("file"));
    let error = Switch::open(other).err().unwrap().to_string();
    assert!(error.contains("no socket"), "{error}");
    assert_eq!(std::fs::read(home.path("file")).unwrap(), b"mine");
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let mut own = config(&home);
    own.sockets.access.mode = 0o660;
    let switch = Served::new(own).0;
    assert_eq!(mode(&home.path("stream")), 0o660);
    // Who may make files there may not take others' away.
    assert_eq!(mode(&home.path("dgram")), 0o1770);
    let _one = Stream::join(&home);
    let _two = Packets::join(&home);
    ports(&switch, 2);
}

#[test]
fn a_named_client_finds_the_next_switch_by_itself_and_a_dead_one_is_forgotten() {
    let home = TestDir::new("sockets");
    let switch = served(&home);
    let one = Named::join(&home, "one");
    ports(&switch, 1);
    drop(switch);
    assert!(home.path("dgram/one").exists());
    let switch = served(&home);
    ports(&switch, 1);
    let other = Stream::join(&home);
    ports(&switch, 2);
    let hello = frame(ALL, 1, 0, 60);
    one.send(&hello);
    assert_eq!(other.next(), hello);
    other.send(&hello);
    assert_eq!(one.next(), hello);
    // Others' frames do not get in by its name.
    let stranger = UnixDatagram::unbound().unwrap();
    let sent = stranger.send_to(&hello, one.port());
    assert_eq!(sent.unwrap_err().kind(), ErrorKind::PermissionDenied);
    // What is no socket, or nobody's, gets no port.
    std::fs::write(home.path("dgram/file"), "").unwrap();
    std::os::unix::fs::symlink("one", home.path("dgram/link")).unwrap();
    // It goes without a word, and its file stays.
    drop(one);
    ports(&switch, 1);
    let left = std::fs::symlink_metadata(home.path("dgram/one")).unwrap();
    assert!(left.file_type().is_socket());
    let again = Named::join(&home, "one");
    ports(&switch, 2);
    again.send(&hello);
    assert_eq!(other.next(), hello);
    let files = std::fs::read_dir(home.path("dgram")).unwrap().count();
    assert_eq!(files, 4, "one, its port, and what was put there");
}
