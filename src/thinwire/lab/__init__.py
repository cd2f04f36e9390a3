"""The lab: does compression pay, end to end?"""
