//! Races: arguments change while a call is judged. `GOOD` is a port that is allowed, `BAD` one that is not.

use std::net::UdpSocket;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::sys::{self, ADDRESS, Arena, BAD, GOOD, HEADER, call};

/// Runs one kind: prints how many calls were done, refused, failed, and went to the bad port as far as this process sees it.
pub(crate) fn run(words: &[String]) -> ExitCode {
    let [kind, calls, good, bad] = words else {
        return ExitCode::from(2);
    };
    let calls: u64 = calls.parse().unwrap();
    let (good, bad): (u16, u16) = (good.parse().unwrap(), bad.parse().unwrap());
    let arena = Arena::new(good, bad);
    // Every other run flips from another process that shares the memory.
    let by_process = calls % 2 == 1 && kind != "dup2" && kind != "unmapped";
    let goes_on = Arc::new(AtomicBool::new(true));
    let numbers = sockets();
    let flipper = if by_process {
        match sys::fork() {
            0 => loop {
                flip(kind, &arena, good, bad, numbers);
            },
            pid => Flipper::Process(pid),
        }
    } else {
        let (kind, goes_on) = (kind.clone(), Arc::clone(&goes_on));
        Flipper::Thread(thread::spawn(move || {
            while goes_on.load(Ordering::Relaxed) {
                flip(&kind, &arena, good, bad, numbers);
            }
        }))
    };
    let mut sum = [0_u64; 4];
    for index in 0..calls {
        arena.put_data(index);
        let (result, is_bad) = once(kind, &arena, bad, numbers);
        let place = match result {
            _ if is_bad => 3,
            0.. => 0,
            error if -error == i64::from(libc::EACCES) => 1,
            _ => 2,
        };
        sum[place] += 1;
    }
    goes_on.store(false, Ordering::Relaxed);
    match flipper {
        Flipper::Process(pid) => sys::end(pid),
        Flipper::Thread(thread) => thread.join().unwrap(),
    }
    println!(
        "{kind} done={} refused={} failed={} bad={}",
        sum[0], sum[1], sum[2], sum[3]
    );
    ExitCode::SUCCESS
}

enum Flipper {
    Process(i32),
    Thread(thread::JoinHandle<()>),
}

/// A TCP socket, a UDP socket and a number that is one or the other.
fn sockets() -> [i32; 3] {
    let tcp = socket(libc::SOCK_STREAM);
    let udp = socket(libc::SOCK_DGRAM);
    [tcp, udp, socket(libc::SOCK_DGRAM)]
}

fn flip(kind: &str, arena: &Arena, good: u16, bad: u16, [tcp, udp, either]: [i32; 3]) {
    match kind {
        "sendmsg-pointer" => {
            arena.name().store(arena.at(GOOD), Ordering::Relaxed);
            pause();
            arena.name().store(arena.at(BAD), Ordering::Relaxed);
            pause();
        }
        "dup2" => {
            for from in [udp, tcp] {
                call(libc::SYS_dup3, [from as u64, either as u64, 0, 0, 0, 0]);
                pause();
            }
        }
        "unmapped" => {
            arena.map_header(false);
            pause();
            arena.port().store(bad.to_be(), Ordering::Relaxed);
            arena.map_header(true);
            pause();
            arena.port().store(good.to_be(), Ordering::Relaxed);
            pause();
        }
        _ => {
            arena.port().store(good.to_be(), Ordering::Relaxed);
            pause();
            arena.port().store(bad.to_be(), Ordering::Relaxed);
            pause();
        }
    }
}

/// Both values last a moment, at times a long one.
fn pause() {
    for _ in 0..(sys::now_ns() % 64) * 8 {
        std::hint::spin_loop();
    }
}

fn socket(kind: i32) -> i32 {
    let kind = (kind | libc::SOCK_CLOEXEC) as u64;
    call(libc::SYS_socket, [libc::AF_INET as u64, kind, 0, 0, 0, 0]) as i32
}

/// One call; its result, and whether this process sees that it went to the bad port.
fn once(kind: &str, arena: &Arena, bad: u16, [tcp, udp, either]: [i32; 3]) -> (i64, bool) {
    let (address, header) = (arena.at(ADDRESS), arena.at(HEADER));
    let data = arena.at(2048);
    let number = udp as u64;
    let is_bad = |socket: i32| peer(socket) == Some(bad);
    match kind {
        "connect-tcp" | "fastopen" => {
            let socket = socket(libc::SOCK_STREAM);
            let result = if kind == "connect-tcp" {
                call(libc::SYS_connect, [socket as u64, address, 16, 0, 0, 0])
            } else {
                let flags = libc::MSG_FASTOPEN as u64;
                call(
                    libc::SYS_sendto,
                    [socket as u64, data, 8, flags, address, 16],
                )
            };
            let bad = is_bad(socket);
            reset(socket);
            (result, bad)
        }
        "connect-udp" => {
            let result = call(libc::SYS_connect, [number, address, 16, 0, 0, 0]);
            (result, is_bad(udp) && result == 0)
        }
        "bind" => {
            let socket = socket(libc::SOCK_DGRAM);
            let result = call(libc::SYS_bind, [socket as u64, address, 16, 0, 0, 0]);
            let own = udp_of(socket);
            let is_bad = own.local_addr().is_ok_and(|own| own.port() == bad);
            (result, is_bad)
        }
        "sendto" => (
            call(libc::SYS_sendto, [number, data, 8, 0, address, 16]),
            false,
        ),
        "sendmsg-address" | "sendmsg-pointer" | "unmapped" => {
            (call(libc::SYS_sendmsg, [number, header, 0, 0, 0, 0]), false)
        }
        "sendmmsg" => (
            call(libc::SYS_sendmmsg, [number, header, 1, 0, 0, 0]),
            false,
        ),
        "dup2" => {
            arena.port().store(bad.to_be(), Ordering::Relaxed);
            let result = call(libc::SYS_connect, [either as u64, address, 16, 0, 0, 0]);
            // Both are allowed to speak UDP there. TCP must have connected nothing.
            let is_bad = is_bad(tcp);
            if is_bad {
                // Take it back for the next time.
                call(libc::SYS_shutdown, [tcp as u64, 2, 0, 0, 0, 0]);
                let fresh = socket(libc::SOCK_STREAM);
                call(libc::SYS_dup3, [fresh as u64, tcp as u64, 0, 0, 0, 0]);
                call(libc::SYS_close, [fresh as u64, 0, 0, 0, 0, 0]);
            }
            (result, is_bad)
        }
        _ => panic!("{kind}"),
    }
}

fn peer(number: i32) -> Option<u16> {
    let socket = udp_of(number);
    let peer = socket.peer_addr().ok().map(|peer| peer.port());
    std::mem::forget(socket);
    peer
}

fn udp_of(number: i32) -> UdpSocket {
    crate::acts::adopt(number)
}

/// Closes a TCP socket without leaving its port in use.
fn reset(number: i32) {
    let value = [1_i32, 0];
    let pointer = value.as_ptr() as u64;
    let (level, name) = (libc::SOL_SOCKET as u64, libc::SO_LINGER as u64);
    call(
        libc::SYS_setsockopt,
        [number as u64, level, name, pointer, 8, 0],
    );
    call(libc::SYS_close, [number as u64, 0, 0, 0, 0, 0]);
}
