//! The header and the Rust side agree, checked by the C and C++ compilers.

use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::offset_of;
use std::process::{Command, Stdio};

use super::backend::*;
use super::channel::*;
use super::error::DEFECT;
use super::list::*;
use super::packet::*;
use super::rules::*;
use super::*;

fn compile(compiler: &str, language: &str, source: &str) {
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
    let mut child = Command::new(compiler)
        .args([
            "-fsyntax-only",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
            "-x",
            language,
            "-",
        ])
        .args(["-I", include])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(source.as_bytes())
        .unwrap();
    assert!(child.wait().unwrap().success(), "{compiler}:\n{source}");
}

macro_rules! layout {
    ($out:ident, $c:literal, $rust:ty, $($field:ident),+) => {
        writeln!($out, "CHECK(sizeof(struct {}) == {});", $c, size_of::<$rust>()).unwrap();
        $(writeln!(
            $out,
            "CHECK(offsetof(struct {}, {}) == {});",
            $c, stringify!($field), offset_of!($rust, $field)
        ).unwrap();)+
    };
}

fn layouts() -> String {
    let mut out = String::new();
    layout!(
        out,
        "vnplug_packet",
        CPacket,
        data,
        ts_ns,
        cap_len,
        wire_len,
        flow_hash,
        lost,
        flags,
        vlan_tci,
        source,
        queue
    );
    layout!(out, "vnplug_insn", CInsn, code, jt, jf, k);
    layout!(
        out,
        "vnplug_options",
        COptions,
        size,
        device,
        filter,
        program,
        program_len,
        ring_bytes,
        max_delay_us,
        watermark,
        snaplen,
        direction,
        sample,
        cluster,
        balance,
        no_reconnect,
        label,
        socket,
        paused,
        waiting,
        transmit_bytes,
        spin_us,
        longest_sleep_us,
        group,
        arena_bytes,
        segments,
        posts,
        twin,
        joins,
        reserved
    );
    layout!(
        out,
        "vnplug_backend_options",
        CBackEndOptions,
        size,
        name,
        socket,
        id,
        version,
        events_in,
        events_out
    );
    layout!(
        out,
        "vnplug_news",
        CNews,
        size,
        kind,
        channel,
        event,
        region,
        count,
        version,
        within_ms,
        bytes,
        len,
        text,
        label
    );
    layout!(out, "vnplug_memory", CMemory, data, len, writable, reserved);
    layout!(
        out,
        "vnplug_channel_options",
        CChannelOptions,
        size,
        name,
        label,
        socket,
        id,
        version,
        wait,
        reserved
    );
    layout!(
        out,
        "vnplug_backend_info",
        CBackendInfo,
        name,
        id,
        is_there,
        version,
        channels
    );
    layout!(out, "vnplug_tuning", CTuning, direction, sample, paused);
    layout!(
        out,
        "vnplug_flow",
        CFlow,
        vlan_id,
        proto,
        version,
        host_a,
        host_b,
        port_a,
        port_b
    );
    layout!(
        out,
        "vnplug_pattern",
        CPattern,
        vlan_id,
        ethertype,
        proto,
        bidirectional,
        source_mac,
        target_mac,
        version,
        tos,
        tos_mask,
        tcp_flags,
        tcp_flags_mask,
        unused,
        source,
        source_mask,
        target,
        target_mask,
        source_ports,
        target_ports
    );
    layout!(out, "vnplug_rule_stats", CRuleStats, matched, idle_ms);
    layout!(
        out,
        "vnplug_stats",
        CStats,
        size,
        received,
        bytes,
        lost,
        gaps,
        reopened
    );
    layout!(
        out,
        "vnplug_device",
        CDevice,
        name,
        kind,
        state,
        description,
        queues,
        ports,
        link_type,
        mtu,
        speed_mbps,
        mac,
        addresses
    );
    out
}

fn values() -> String {
    use vnplug_ring::layout::flags;
    let refused = |code| Error::Refused {
        code,
        text: String::new(),
    };
    let checks = [
        ("VNPLUG_PACKET", PACKET),
        ("VNPLUG_E_INVALID", E_INVALID),
        ("VNPLUG_E_INTERNAL", number(&Error::Invalid(DEFECT))),
        (
            "VNPLUG_E_SOURCE",
            number(&Error::SourceFailed(String::new())),
        ),
        ("VNPLUG_E_DISCONNECTED", number(&Error::Disconnected)),
        ("VNPLUG_E_TIMED_OUT", number(&Error::TimedOut)),
        ("VNPLUG_E_PROTOCOL", number(&Error::Protocol(String::new()))),
        ("VNPLUG_E_REFUSED", number(&refused(code::INTERNAL))),
        ("VNPLUG_E_NOT_FOUND", number(&refused(code::NOT_FOUND))),
        ("VNPLUG_E_DENIED", number(&refused(code::DENIED))),
        ("VNPLUG_E_FILTER", number(&refused(code::FILTER))),
        ("VNPLUG_E_NO_MEMORY", number(&refused(code::NO_MEMORY))),
        ("VNPLUG_E_LIMIT", number(&refused(code::LIMIT))),
        ("VNPLUG_E_UNAVAILABLE", number(&refused(code::UNAVAILABLE))),
        ("VNPLUG_E_FULL", number(&Error::Full)),
        ("VNPLUG_NEWS_JOINED", JOINED as c_int),
        ("VNPLUG_NEWS_MESSAGE", MESSAGE as c_int),
        ("VNPLUG_NEWS_EVENT", EVENT as c_int),
        ("VNPLUG_NEWS_LEFT", LEFT as c_int),
        ("VNPLUG_NEWS_GONE", GONE as c_int),
        ("VNPLUG_NEWS_BACK", BACK as c_int),
        ("VNPLUG_NEWS_SHARED", SHARED as c_int),
        ("VNPLUG_NEWS_WITHDRAW", WITHDRAW as c_int),
        ("VNPLUG_MAX_SAID", crate::MAX_SAID as c_int),
        ("VNPLUG_MAX_EVENTS", crate::MAX_EVENTS as c_int),
        ("VNPLUG_E_GONE", number(&Error::Gone(String::new()))),
        ("VNPLUG_E_QUARANTINED", number(&Error::Quarantined)),
        ("VNPLUG_FLAG_OUTBOUND", flags::OUTBOUND.into()),
        ("VNPLUG_FLAG_VLAN", flags::VLAN.into()),
        ("VNPLUG_FLAG_HW_TIMESTAMP", flags::HW_TIMESTAMP.into()),
        ("VNPLUG_FLAG_GAP", flags::GAP.into()),
        ("VNPLUG_FLAG_SOURCE_LOSS", flags::SOURCE_LOSS.into()),
        ("VNPLUG_FLAG_CSUM_NOT_READY", flags::CSUM_NOT_READY.into()),
        ("VNPLUG_FLAG_OFFLOAD", flags::OFFLOAD.into()),
    ];
    checks.iter().fold(String::new(), |mut out, (name, value)| {
        writeln!(out, "CHECK({name} == {value});").unwrap();
        out
    })
}

#[test]
fn sizes_offsets_and_values_are_the_same_in_c() {
    let head = "#include <vnplug.h>\n#define CHECK(x) _Static_assert(x, #x)\n";
    compile("cc", "c", &[head, &layouts(), &values()].concat());
}

#[test]
fn the_header_is_good_in_cpp_and_they_are_the_same_there() {
    let head = "#include <vnplug.h>\n#define CHECK(x) static_assert(x, #x)\n";
    compile("c++", "c++", &[head, &layouts(), &values()].concat());
}

#[test]
fn null_pointers_are_refused_everywhere() {
    // SAFETY: null is allowed for every pointer.
    unsafe {
        let null = ptr::null_mut();
        let mut packet = std::mem::MaybeUninit::uninit();
        assert_eq!(
            vnplug_open(ptr::null(), ptr::null_mut(), 0, ptr::null_mut()),
            E_INVALID
        );
        assert_eq!(vnplug_next(null, packet.as_mut_ptr()), E_INVALID);
        assert_eq!(
            vnplug_next_batch(null, packet.as_mut_ptr(), 1, &mut 0),
            E_INVALID
        );
        assert_eq!(vnplug_wait(null, 0), E_INVALID);
        assert_eq!(send::vnplug_send(null, ptr::null(), 0), E_INVALID);
        assert_eq!(send::vnplug_flush(null), E_INVALID);
        assert_eq!(send::vnplug_wait_for_room(null, 0, 0), E_INVALID);
        let ports = ptr::null_mut();
        let spread = send::vnplug_open_spread(ptr::null(), 1, ptr::null_mut(), 0, ports);
        assert_eq!(spread, E_INVALID);
        assert_eq!(vnplug_fd(null), E_INVALID);
        let (back_end, channel) = (ptr::null_mut(), ptr::null_mut());
        assert_eq!(vnplug_backend_next(back_end, 0, ptr::null_mut()), E_INVALID);
        assert_eq!(vnplug_backend_send(back_end, 1, ptr::null(), 0), E_INVALID);
        assert_eq!(vnplug_backend_withdraw(back_end, 1, 0), E_INVALID);
        assert_eq!(vnplug_backend_fd(back_end), E_INVALID);
        assert_eq!(vnplug_channel_next(channel, 0, ptr::null_mut()), E_INVALID);
        assert_eq!(vnplug_channel_send(channel, ptr::null(), 0), E_INVALID);
        assert_eq!(vnplug_channel_release(channel, 1), E_INVALID);
        assert_eq!(vnplug_channel_fd(channel), E_INVALID);
        assert_eq!(vnplug_set_filter(null, ptr::null()), E_INVALID);
        assert_eq!(vnplug_stats(null, ptr::null_mut()), E_INVALID);
        assert_eq!(
            vnplug_host_counter(null, ptr::null(), ptr::null_mut()),
            E_INVALID
        );
        let bundle = ptr::null_mut();
        let made = bundle::vnplug_bundle_new(ptr::null_mut(), 0, ptr::null_mut());
        assert_eq!(made, E_INVALID);
        let mut port = null;
        let opened = bundle::vnplug_bundle_open(bundle, ptr::null(), ptr::null_mut(), 0, &mut port);
        assert_eq!(opened, E_INVALID);
        assert_eq!(bundle::vnplug_bundle_wait(bundle, 0), E_INVALID);
        let mut count = 1;
        bundle::vnplug_bundle_ports(bundle, &mut count);
        assert_eq!(count, 0);
        bundle::vnplug_bundle_close(bundle);
        vnplug_release(null);
        vnplug_close(null);
        vnplug_list_free(ptr::null_mut(), 0);
    }
}

#[test]
fn a_panic_becomes_an_error() {
    let caught = guarded::<()>(|| panic!("on purpose"));
    assert_eq!(caught.map_err(|error| number(&error)), Err(-24));
}

#[test]
fn options_of_another_size_are_understood_or_refused() {
    // SAFETY: all-zero is a valid COptions.
    let mut options: [COptions; 2] = unsafe { std::mem::zeroed() };
    options[0].device = c"host:eth0".as_ptr();
    let read = |options: &[COptions; 2]| {
        // SAFETY: `size` is at most that of the array; strings are literals.
        unsafe { read_options(options.as_ptr()) }
    };
    options[0].size = 2 * size_of::<usize>();
    assert_eq!(read(&options).unwrap().request.device, "host:eth0");
    options[0].size = 2 * size_of::<COptions>();
    assert!(read(&options).is_ok(), "unknown fields at their default");
    options[1].watermark = 1;
    assert!(matches!(read(&options), Err(Error::Invalid(_))));
    options[0].size = 0;
    assert!(matches!(read(&options), Err(Error::Invalid(_))));
}

#[test]
fn an_error_text_is_cut_to_the_buffer() {
    let mut buffer = [1 as c_char; 8];
    // SAFETY: seven of the eight bytes are offered.
    unsafe { tell(&Error::Disconnected, buffer.as_mut_ptr(), 7) };
    let told: Vec<u8> = buffer.iter().map(|&byte| byte as u8).collect();
    assert_eq!(told, b"the co\0\x01");
}
