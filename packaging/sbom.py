#!/usr/bin/env python3
"""Writes the bill of materials of a release, SPDX 2.3 in JSON, to stdout.

    packaging/sbom.py --toolchain CPU COMPILER VERSION LIBRARY VERSION [--toolchain ...]
                      VERSION COMMIT EPOCH FILE...

COMPILER and LIBRARY are the Debian packages of g++ and of libstdc++, which is linked in, that the
files for CPU (x86_64 or aarch64) were built with. Files are named as in SHA256SUMS. The same
arguments give the same bytes.
"""

import argparse
import datetime
import hashlib
import json
import os
import sys

NOASSERTION = 'NOASSERTION'
GCC_LICENCE = 'GPL-3.0-or-later WITH GCC-exception-3.1'


# What the names of a file may say of its processor: of a module and an .rpm, and of a .deb.
NAMES_OF_CPU = {'x86_64': ('x86_64', 'amd64'), 'aarch64': ('aarch64', 'arm64')}


def package(identifier, name, version, licence, supplier, text, **more):
    return {
        'SPDXID': f'SPDXRef-Package-{identifier}',
        'name': name,
        'versionInfo': version,
        'supplier': supplier,
        'downloadLocation': NOASSERTION,
        'licenseConcluded': licence,
        'licenseDeclared': licence,
        'copyrightText': text,
        **more,
    }


def file_entry(path):
    with open(path, 'rb') as file:
        content = file.read()
    name = os.path.basename(path)
    return {
        'SPDXID': f'SPDXRef-File-{name}'.replace('_', '-'),
        'fileName': f'./{name}',
        'fileTypes': ['SOURCE' if name.endswith('.tar.gz') else 'BINARY'],
        'checksums': [
            {'algorithm': 'SHA1', 'checksumValue': hashlib.sha1(content).hexdigest()},
            {'algorithm': 'SHA256', 'checksumValue': hashlib.sha256(content).hexdigest()},
        ],
        'licenseConcluded': 'BSD-3-Clause' if name.endswith('.tar.gz')
                            else f'BSD-3-Clause AND {GCC_LICENCE}',
        'licenseInfoInFiles': [NOASSERTION],
        'copyrightText': NOASSERTION,
    }


def verification_code(files):
    """As SPDX 2.3 defines it: the SHA-1 of the sorted SHA-1s of all files."""
    sums = sorted(file['checksums'][0]['checksumValue'] for file in files)
    return hashlib.sha1(''.join(sums).encode()).hexdigest()


def toolchain_packages(cpu, compiler, compiler_version, library, library_version):
    """The compiler and the library that the files for this processor were built with."""
    name = cpu.replace('_', '-')
    return (
        package(
            f'gcc-{name}', compiler, compiler_version, 'GPL-3.0-or-later',
            'Organization: Free Software Foundation',
            'Copyright (C) Free Software Foundation, Inc.', filesAnalyzed=False,
            comment=f'The compiler of the files for {cpu}.'),
        package(
            f'libstdcxx-{name}', library, library_version, GCC_LICENCE,
            'Organization: Free Software Foundation',
            'Copyright (C) Free Software Foundation, Inc.', filesAnalyzed=False,
            comment=f'Parts of it are linked statically into the files for {cpu}.'))


def main():
    arguments = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    arguments.add_argument('--toolchain', nargs=5, action='append', required=True,
                           metavar=('CPU', 'COMPILER', 'VERSION', 'LIBRARY', 'VERSION'))
    for name in ('version', 'commit', 'epoch'):
        arguments.add_argument(name)
    arguments.add_argument('paths', nargs='+', metavar='FILE')
    arguments = arguments.parse_args()
    version, commit = arguments.version, arguments.commit
    created = datetime.datetime.fromtimestamp(int(arguments.epoch), datetime.timezone.utc)
    files = sorted((file_entry(path) for path in arguments.paths),
                   key=lambda file: file['fileName'])
    toolchains = {each[0]: toolchain_packages(*each) for each in arguments.toolchain}
    turnstile = package(
        'turnstile', 'turnstile', version, 'BSD-3-Clause', 'Organization: The Turnstile authors',
        'Copyright (c) 2026 the Turnstile authors', filesAnalyzed=True,
        packageVerificationCode={'packageVerificationCodeValue': verification_code(files)},
        licenseInfoFromFiles=[NOASSERTION], sourceInfo=f'built from the commit {commit}')
    sdk = package(
        'redismodule.h', 'redismodule.h', '7.0.15', 'BSD-3-Clause', 'Organization: Redis Ltd.',
        'Copyright (c) 2006-2020, Salvatore Sanfilippo',
        filesAnalyzed=False, comment='The header of the module API, from the source of Redis.')

    def relationship(of, kind, to):
        return {'spdxElementId': of, 'relationshipType': kind, 'relatedSpdxElement': to}

    relationships = [relationship('SPDXRef-DOCUMENT', 'DESCRIBES', turnstile['SPDXID'])]
    for file in files:
        relationships.append(relationship(turnstile['SPDXID'], 'CONTAINS', file['SPDXID']))
        if file['fileTypes'] == ['BINARY']:
            cpu, = (cpu for cpu, names in NAMES_OF_CPU.items()
                    if any(name in file['fileName'] for name in names))
            compiler, library = toolchains[cpu]
            relationships.append(relationship(file['SPDXID'], 'STATIC_LINK', library['SPDXID']))
            relationships.append(
                relationship(compiler['SPDXID'], 'BUILD_TOOL_OF', file['SPDXID']))
    relationships.append(relationship(turnstile['SPDXID'], 'DEPENDS_ON', sdk['SPDXID']))

    json.dump({
        'spdxVersion': 'SPDX-2.3',
        'dataLicense': 'CC0-1.0',
        'SPDXID': 'SPDXRef-DOCUMENT',
        'name': f'turnstile-{version}',
        'documentNamespace': f'https://spdx.org/spdxdocs/turnstile-{version}-{commit}',
        'creationInfo': {
            'created': created.strftime('%Y-%m-%dT%H:%M:%SZ'),
            'creators': ['Tool: packaging/sbom.py', 'Organization: The Turnstile authors'],
        },
        'packages': [turnstile, sdk, *sum(toolchains.values(), ())],
        'files': files,
        'relationships': relationships,
    }, sys.stdout, indent=2, sort_keys=True)
    print()


if __name__ == '__main__':
    main()
